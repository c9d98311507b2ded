//! Calls whose results are used before they have finished. Later work waits for them on the device,
//! and a thread waits until they have finished, or aborts them so that the waiting work is
//! released.

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::memory::StreamEvent;
use super::peers::Peers;
use crate::comm::control::ExternalCall;
use crate::error::{Error, Result};

/// The time between two polls of a call.
const POLL_INTERVAL: Duration = Duration::from_micros(500);

const THREAD_LIVES: &str = "the thread receives orders until the watch is dropped";

/// Follows the calls of a group until they end, on a thread that the first call starts.
#[derive(Debug)]
pub struct Watch {
    peers: Arc<Peers>,
    thread: Mutex<Option<Watcher>>,
    error: Arc<OnceLock<Error>>,
}

#[derive(Debug)]
struct Watcher {
    orders: mpsc::Sender<Order>,
    thread: JoinHandle<()>,
}

enum Order {
    /// Follow a call until it may start, and then until it has finished.
    Follow(ExternalCall, [Box<dyn StreamEvent>; 2]),
    /// Send a reply when all calls before this order have ended.
    Reply(mpsc::Sender<()>),
}

impl Watch {
    pub fn new(peers: Arc<Peers>) -> Self {
        Self { peers, thread: Mutex::default(), error: Arc::default() }
    }

    /// Follows a call from one event to the other. Calls are given in the order of their events.
    pub fn follow(&self, call: ExternalCall, events: [Box<dyn StreamEvent>; 2]) {
        let mut thread = self.thread.lock().expect("nothing panics while it holds the lock");
        let watcher = thread.get_or_insert_with(|| Watcher::start(&self.peers, &self.error));
        watcher.orders.send(Order::Follow(call, events)).expect(THREAD_LIVES);
    }

    /// Returns the first error of the calls that have ended so far.
    ///
    /// # Errors
    ///
    /// That error.
    pub fn check(&self) -> Result<()> {
        self.error.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Waits until all calls that are followed have ended.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn flush(&self) -> Result<()> {
        // The lock is released before the wait: other threads may start calls meanwhile.
        let orders = {
            let thread = self.thread.lock().expect("nothing panics while it holds the lock");
            thread.as_ref().map(|watcher| watcher.orders.clone())
        };
        if let Some(orders) = orders {
            let (sender, reply) = mpsc::channel();
            orders.send(Order::Reply(sender)).expect(THREAD_LIVES);
            reply.recv().expect("the thread replies to every order");
        }
        self.check()
    }
}

impl Watcher {
    fn start(peers: &Arc<Peers>, error: &Arc<OnceLock<Error>>) -> Self {
        let (orders, received) = mpsc::channel();
        let peers = peers.clone();
        let first_error = error.clone();
        let work = move || {
            for order in received {
                match order {
                    Order::Follow(call, events) => {
                        let events = events.each_ref().map(|event| &**event);
                        let ended = peers.finish(&call, events, || thread::sleep(POLL_INTERVAL));
                        // `set` fails if an earlier call has failed: its error is the cause.
                        ended.unwrap_or_else(|error| _ = first_error.set(error));
                    }
                    Order::Reply(sender) => _ = sender.send(()),
                }
            }
        };
        Self { orders, thread: thread::spawn(work) }
    }
}

impl Drop for Watch {
    /// Waits until the last calls have ended.
    fn drop(&mut self) {
        let Ok(Some(Watcher { orders, thread })) = self.thread.get_mut().map(Option::take) else {
            return;
        };
        // After a panic, calls in flight are aborted: the join below would wait for other ranks.
        if thread::panicking() {
            self.peers.control.fail("it panicked");
            self.peers.comm.abort();
        }
        // Without a sender, the thread ends after its last order.
        drop(orders);
        thread.join().ok();
    }
}
