//! Results that are in use before they are there: later work waits for them on the device, and a
//! thread sees to it that they come, or that the waiting work is released.

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::super::control::Elsewhere;
use super::memory::Mark;
use super::peers::Peers;
use crate::error::{Error, Result};

/// Time between looks at a call.
const PAUSE: Duration = Duration::from_micros(500);

/// Follows the calls of a group to their ends, on a thread that the first of them starts.
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
    Follow(Elsewhere, [Box<dyn Mark>; 2]),
    /// Tell when all calls so far have ended.
    Tell(mpsc::Sender<()>),
}

impl Watch {
    pub fn new(peers: Arc<Peers>) -> Self {
        Self { peers, thread: Mutex::default(), error: Arc::default() }
    }

    /// Follows a call from one mark to the other. Calls are given in the order of their marks.
    pub fn follow(&self, call: Elsewhere, marks: [Box<dyn Mark>; 2]) {
        let mut thread = self.thread.lock().expect("nothing panics while it holds the lock");
        let watcher = thread.get_or_insert_with(|| Watcher::start(&self.peers, &self.error));
        watcher.orders.send(Order::Follow(call, marks)).expect("the thread ends with this");
    }

    /// Returns the first error of the calls that have ended.
    ///
    /// # Errors
    ///
    /// That of the first that did not.
    pub fn check(&self) -> Result<()> {
        self.error.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Waits until all calls that are followed have ended.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn flush(&self) -> Result<()> {
        let orders = {
            let thread = self.thread.lock().expect("nothing panics while it holds the lock");
            thread.as_ref().map(|watcher| watcher.orders.clone())
        };
        if let Some(orders) = orders {
            let (tell, told) = mpsc::channel();
            orders.send(Order::Tell(tell)).expect("the thread ends with this");
            told.recv().expect("the thread answers every order");
        }
        self.check()
    }
}

impl Watcher {
    fn start(peers: &Arc<Peers>, error: &Arc<OnceLock<Error>>) -> Self {
        let (orders, received) = mpsc::channel();
        let (peers, first) = (peers.clone(), error.clone());
        let work = move || {
            for order in received {
                match order {
                    Order::Follow(call, marks) => {
                        let marks = marks.each_ref().map(|mark| &**mark);
                        let ended = peers.finish(&call, marks, || thread::sleep(PAUSE));
                        ended.unwrap_or_else(|error| _ = first.set(error));
                    }
                    Order::Tell(tell) => _ = tell.send(()),
                }
            }
        };
        Self { orders, thread: thread::spawn(work) }
    }
}

impl Drop for Watch {
    /// Waits for the last calls.
    fn drop(&mut self) {
        let Ok(Some(Watcher { orders, thread })) = self.thread.get_mut().map(Option::take) else {
            return;
        };
        if thread::panicking() {
            self.peers.control.fail("it panicked");
            self.peers.group.abort();
        }
        drop(orders);
        thread.join().ok();
    }
}
