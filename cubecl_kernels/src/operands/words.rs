//! Words in memory, by which a side stream waits for one of CubeCL's streams.
//!
//! CubeCL's stream of a thread writes the next number into its word, after all work that it was
//! given so far. The side stream waits until the word has the number (`cuStreamWaitValue32`), and
//! for nothing else of the context: neither for CubeCL's other streams nor for other side streams.
//!
//! The driver does not know this order. Streams may share a queue of the device, so work is given
//! to the driver before what waits for it: in that order, a shared queue only delays it.

use std::collections::HashMap;
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

use super::{Operand, failed};
use crate::native::{DriverError, Ready, Refusal, SideEvent, SideStream};

/// A word has this number first. Numbers soon wrap around, so that every process shows that the
/// driver compares them accordingly.
const FIRST: u32 = u32::MAX - 2;

/// The time in which a stream that does not wait for a word passes it.
const PAUSE: Duration = Duration::from_millis(5);

/// A stream that does not pass a word within this time, once the word has the number, never will.
const DEADLINE: Duration = Duration::from_secs(5);

/// The words of a device: one for each of CubeCL's streams that had work for a side stream, since
/// the numbers in a word grow in the order of one stream's work. They are kept to the end of the
/// process.
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

    /// Fails unless a stream waits for a number that is not written yet, and passes when it is.
    fn verify(&self, client: &Client, device: usize) -> Result<(), Refusal> {
        let driver = |error| Refusal::new("verify words in memory", error);
        let open = || SideStream::new(device).map_err(driver);
        let (address, number) = self.announce(client)?;
        let next = number.wrapping_add(1);
        // The next write then has memory of the host: an allocation could wait for the stream,
        // which waits for that write.
        for _ in 0..2 {
            client.flush().map_err(failed("write a word"))?;
        }
        let stream = open()?;
        stream.wait_for(Ready::Word { address, number: next }).map_err(driver)?;
        let event = stream.record().map_err(driver)?;
        let is_early = is_passed_within(&event, PAUSE).map_err(driver)?;
        let announced = self.announce(client);
        let is_passed = announced.is_ok() && is_passed_within(&event, DEADLINE).map_err(driver)?;
        if !is_passed {
            // Nothing else may wait for this stream for ever, such as the end of the process.
            open()?.write_word(address, next).map_err(driver)?;
        }
        match (announced, is_early, is_passed) {
            (Err(reason), ..) => Err(reason),
            (_, true, _) => Err(Refusal("streams do not wait for words".to_owned())),
            (_, _, false) => Err(Refusal(format!("a stream waits for a word after {DEADLINE:?}"))),
            (Ok(_), false, true) => Ok(()),
        }
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
