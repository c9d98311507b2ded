//! The warnings and errors that the library logs in this process.

use std::sync::{Mutex, Once};

use log::{LevelFilter, Log, Metadata, Record};

static MESSAGES: Mutex<Vec<String>> = Mutex::new(vec![]);

struct Collector;

impl Log for Collector {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        let message = format!("{}: {}", record.level(), record.args());
        MESSAGES.lock().expect("no holder of the lock panics").push(message);
    }

    fn flush(&self) {}
}

/// Collects messages from now on.
///
/// # Panics
///
/// If the process has another logger.
pub fn collect() {
    static START: Once = Once::new();
    START.call_once(|| {
        log::set_logger(&Collector).expect("no other logger is set");
        log::set_max_level(LevelFilter::Warn);
    });
}

/// The collected messages, as `LEVEL: text`, that contain all of the words. Tests share them, so
/// one of the words must be the test's own.
pub fn with(words: &[&str]) -> Vec<String> {
    let messages = MESSAGES.lock().expect("no holder of the lock panics");
    let has_all = |message: &&String| words.iter().all(|word| message.contains(word));
    messages.iter().filter(has_all).cloned().collect()
}
