//! A thread that carries out calls in order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

type Call = Box<dyn FnOnce() + Send>;

pub struct Stream {
    calls: mpsc::Sender<Call>,
    launched: AtomicU64,
    finished: Arc<AtomicU64>,
}

impl Stream {
    pub fn new() -> Self {
        let (calls, received) = mpsc::channel::<Call>();
        let finished = Arc::new(AtomicU64::new(0));
        let counted = finished.clone();
        thread::spawn(move || {
            for call in received {
                call();
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { calls, launched: AtomicU64::new(0), finished }
    }

    pub fn launch(&self, call: impl FnOnce() + Send + 'static) {
        self.launched.fetch_add(1, Ordering::SeqCst);
        self.calls.send(Box::new(call)).expect("the thread lives as long as the stream");
    }

    pub fn launched(&self) -> u64 {
        self.launched.load(Ordering::SeqCst)
    }

    pub fn finished(&self) -> u64 {
        self.finished.load(Ordering::SeqCst)
    }
}
