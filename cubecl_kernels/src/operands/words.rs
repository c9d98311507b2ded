//! Words in memory, by which a side stream waits for one of CubeCL's streams.
//!
//! CubeCL's stream of a thread writes the next number into its word, after all work that it was
//! given so far. The side stream waits until the word has the number (`cuStreamWaitValue32`), and
//! for nothing else of the context: neither for CubeCL's other streams nor for other side streams.
//!
//! The driver does not know this order. Streams may share a queue of the device, so work is given
//! to the driver before what waits for it: in that order, a shared queue only delays it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::future::block_on;
use cubecl::server::Handle;
use cubecl_core::environment::stream::StreamId;
use cubecl_runtime::runtime::Runtime;
use cudarc::driver::result;

use super::{Operand, failed};
use crate::native::{DriverError, Ready, Refusal, SideEvent, SideStream};

/// A word has this number first. The next one is 0, so that every process shows that the driver
/// compares numbers in a circle.
const FIRST: u32 = u32::MAX;

/// The time in which a stream that does not wait for a word passes it.
const PAUSE: Duration = Duration::from_millis(5);

/// A stream that does not pass a word within this time, once the word has the number, never will.
const DEADLINE: Duration = Duration::from_secs(5);

/// The words of a device: one for each of CubeCL's streams that had work for a side stream, since
/// the numbers in a word grow in the order of one stream's work. They are kept to the end of the
/// process, also those of threads that have ended.
#[derive(Default)]
pub struct Words(Mutex<HashMap<StreamId, Word>>);

struct Word {
    handle: Handle,
    memory: Operand,
    /// The last one that CubeCL's stream was given to write.
    number: u32,
}

impl Word {
    fn new(client: &Client) -> Result<Self, Refusal> {
        let handle = client.create_from_slice(&FIRST.to_ne_bytes());
        let memory = Operand::new(client, &handle).map_err(failed("pin a word"))?;
        // Before that, memory has any number.
        block_on(client.sync()).map_err(failed("write a word"))?;
        Ok(Self { handle, memory, number: FIRST })
    }
}

impl Words {
    /// Returns the words of a device, once a stream has waited for a word and has passed it, when
    /// it had the number.
    ///
    /// # Errors
    ///
    /// The reason why streams of the device can't wait for words.
    pub(super) fn verified(device: usize) -> Result<&'static Self, Refusal> {
        let client = CudaRuntime::client(&CudaDevice::new(device));
        // Also kept after a failure, when a stream may still wait for a word.
        let words: &Self = Box::leak(Box::default());
        words.verify(&client, device)?;
        Ok(words)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StreamId, Word>> {
        self.0.lock().expect("nothing panics while it holds the lock")
    }

    /// Gives CubeCL's stream of this thread a number to write, after all work that it was given.
    /// Returns it with the address of the word, when the driver has the write.
    pub(super) fn announce(&self, client: &Client) -> Result<(u64, u32), Refusal> {
        let stream = StreamId::current();
        if !self.lock().contains_key(&stream) {
            // Without the lock: this waits for the stream.
            let word = Word::new(client)?;
            self.lock().entry(stream).or_insert(word);
        }
        let (handle, address, number) = {
            let mut words = self.lock();
            let word = words.get_mut(&stream).expect("a word is never removed");
            word.number = word.number.wrapping_add(1);
            let number = word.number.to_ne_bytes().to_vec();
            client.write(&word.handle, Bytes::from_bytes_vec(number));
            (word.handle.clone(), word.memory.address(), word.number)
        };
        // It returns after the write was given to the driver, or its error; again without the lock.
        client.check([&handle]).map_err(failed("write a word"))?;
        Ok((address, number))
    }

    /// Fails unless a stream waits for a number that is not written yet and passes when it is, and
    /// passes a number that CubeCL has written.
    fn verify(&self, client: &Client, device: usize) -> Result<(), Refusal> {
        let driver = |error| Refusal::new("verify words in memory", error);
        let stream = SideStream::new(device).map_err(driver)?;
        verify_waits(&stream)?;
        // In this order also later: what waits is given to the driver after the write.
        let (address, number) = self.announce(client)?;
        stream.wait_for(Ready::Word { address, number }).map_err(driver)?;
        let event = stream.record().map_err(driver)?;
        match is_passed_within(&event, DEADLINE).map_err(driver)? {
            true => Ok(()),
            false => {
                // Nothing may wait for this stream for ever, such as the end of the process.
                let other = SideStream::new(device).map_err(driver)?;
                other.write_word(address, number).map_err(driver)?;
                Err(too_late())
            }
        }
    }
}

fn too_late() -> Refusal {
    Refusal(format!("a stream waits for a word after {DEADLINE:?}"))
}

/// Fails unless a stream waits for a word that the host writes. The word is in memory of the host:
/// to write it needs no queue of the device, in which the write could come after the wait.
fn verify_waits(stream: &SideStream) -> Result<(), Refusal> {
    let driver = |error| Refusal::new("verify words in memory", error);
    stream.make_current().map_err(driver)?;
    // SAFETY: there are some bytes, which are written below. They are never freed, since a stream
    // may wait for them.
    let memory = unsafe { result::malloc_host(size_of::<AtomicU32>(), 0) }.map_err(driver)?;
    // SAFETY: the memory is aligned to a page, and only this function writes it.
    let word = unsafe { &*memory.cast::<AtomicU32>() };
    word.store(u32::MAX, Ordering::Release);
    // The next number is 0: a driver that does not compare numbers in a circle passes at once.
    let next = Ready::Word { address: memory as u64, number: 0 };
    let passed = stream.wait_for(next).and_then(|()| {
        let event = stream.record()?;
        let is_early = is_passed_within(&event, PAUSE)?;
        word.store(0, Ordering::Release);
        Ok((is_early, is_passed_within(&event, DEADLINE)?))
    });
    // Also after a failure. It is later than all numbers that a stream may wait for here.
    word.store(1 << 30, Ordering::Release);
    match passed.map_err(driver)? {
        (true, _) => Err(Refusal("streams do not wait for words".to_owned())),
        (_, false) => Err(too_late()),
        (false, true) => Ok(()),
    }
}

fn is_passed_within(event: &SideEvent, time: Duration) -> Result<bool, DriverError> {
    let start = Instant::now();
    while !event.is_passed()? {
        if start.elapsed() >= time {
            return Ok(false);
        }
        thread::yield_now();
    }
    Ok(true)
}
