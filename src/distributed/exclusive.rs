//! A value that one thread has at a time, without a lock while it has it.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A value that threads take out and give back. A thread may wait for other ranks while it has the
/// value: it holds no lock then, and another thread can be told so before it waits as well.
#[derive(Debug, Default)]
pub struct Exclusive<T> {
    slot: Mutex<Slot<T>>,
    given_back: Condvar,
}

/// The access for which a thread takes a value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Access {
    /// To look at it or to change it, which takes no time.
    Look,
    /// For a call that may wait for other ranks.
    Call,
}

#[derive(Debug)]
enum Slot<T> {
    Here(T),
    Taken(Access),
}

impl<T: Default> Default for Slot<T> {
    fn default() -> Self {
        Self::Here(T::default())
    }
}

impl<T> Exclusive<T> {
    pub fn new(value: T) -> Self {
        Self { slot: Mutex::new(Slot::Here(value)), given_back: Condvar::new() }
    }

    /// Takes the value, once no other thread has it. If one has it for a call, `in_call` runs once
    /// before this thread waits, and may end that call.
    pub fn take(&self, access: Access, in_call: impl FnOnce()) -> Taken<'_, T> {
        let mut in_call = Some(in_call);
        let mut slot = self.lock();
        // Looked at after every wait: a third thread may have begun a call in the meantime.
        while !matches!(*slot, Slot::Here(_)) {
            match in_call.take_if(|_| matches!(*slot, Slot::Taken(Access::Call))) {
                Some(in_call) => {
                    drop(slot);
                    in_call();
                    slot = self.lock();
                }
                None => {
                    slot = self.given_back.wait(slot).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        let Slot::Here(value) = std::mem::replace(&mut *slot, Slot::Taken(access)) else {
            unreachable!("no other thread has the value");
        };
        Taken { value: Some(value), to: self }
    }

    fn lock(&self) -> MutexGuard<'_, Slot<T>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A value that this thread has. It is given back in the end, also by a panic.
#[derive(Debug)]
pub struct Taken<'a, T> {
    /// `None` only while it is given back.
    value: Option<T>,
    to: &'a Exclusive<T>,
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("the value is given back last")
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("the value is given back last")
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            *self.to.lock() = Slot::Here(value);
            self.to.given_back.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc;
    use std::thread;

    use super::Access::{Call, Look};
    use super::*;

    #[test]
    fn a_thread_is_told_of_a_call_before_it_waits_for_its_end() {
        for access in [Look, Call] {
            let value = Exclusive::new(1);
            let (told, is_told) = mpsc::channel();
            let mut call = value.take(Call, || unreachable!("no other thread has the value"));
            thread::scope(|scope| {
                let other = scope.spawn(|| *value.take(access, || told.send(()).unwrap()));
                // The other thread waits for the value, and no lock is held.
                is_told.recv().unwrap();
                *call = 2;
                drop(call);
                assert_eq!(other.join().unwrap(), 2);
            });
        }
    }

    #[test]
    fn a_waiting_thread_is_told_of_a_call_that_begins_before_its_turn() {
        let value = Exclusive::new(1);
        let (told, is_told) = mpsc::channel();
        let taken = value.take(Look, || {});
        thread::scope(|scope| {
            let other = scope.spawn(|| drop(value.take(Look, || told.send(()).unwrap())));
            // The other thread most likely waits by now. What it does is right in any case.
            thread::sleep(std::time::Duration::from_millis(50));
            // As if a third thread had been faster than the one that waits.
            let mut slot = value.lock();
            let mut taken = taken;
            let kept = taken.value.take().unwrap();
            *slot = Slot::Taken(Call);
            value.given_back.notify_all();
            drop(slot);
            is_told.recv().unwrap();
            taken.value = Some(kept);
            drop(taken);
            other.join().unwrap();
        });
    }

    #[test]
    fn no_thread_is_told_of_one_that_makes_no_call() {
        let value = Exclusive::new(1);
        thread::scope(|scope| {
            let mut taken = value.take(Look, || {});
            let call = scope.spawn(|| *value.take(Call, || panic!("no call is made")));
            let other = scope.spawn(|| *value.take(Look, || {}));
            *taken = 2;
            drop(taken);
            assert_eq!((call.join().unwrap(), other.join().unwrap()), (2, 2));
        });
    }

    #[test]
    fn a_panic_gives_the_value_back() {
        let value = Exclusive::new(1);
        let panics = || {
            *value.take(Look, || {}) = 2;
            let _taken = value.take(Look, || {});
            panic!("while the value is taken");
        };
        catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
        assert_eq!(*value.take(Look, || {}), 2);
    }
}
