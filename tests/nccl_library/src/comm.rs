//! A communicator: a file in memory that all ranks map.
//!
//! The file has a head of counters and one slot for every rank. A collective has rounds: every rank
//! copies a chunk of its contribution into its slot, all ranks meet at a barrier, every rank copies
//! the data that it needs from the slots, and all ranks meet again. In the first round they also
//! compare their calls. Sums are taken in pairs of ranks, then of pairs, and so on. For sends and
//! receives, a slot is divided into a mailbox for every rank. A rank that waits sleeps until
//! another one has changed something: there are more ranks than cores.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use half::{bf16, f16};
use memmap2::{MmapOptions, MmapRaw};

use crate::Code;

/// Bytes of a slot.
const SLOT: usize = 1 << 20;
const MAX_RANKS: usize = 64;
/// The time after which a thread that waits looks again, whatever has changed.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Send,
    Receive,
}

/// The arguments of a call of NCCL.
#[derive(Debug, Clone, Copy)]
pub struct Operation {
    pub kind: Kind,
    pub source: *const u8,
    pub target: *mut u8,
    pub count: usize,
    pub dtype: i32,
    /// The root of a broadcast, or the other rank of a send or receive.
    pub peer: usize,
}

// SAFETY: the caller keeps both buffers until the stream has passed the call, on any thread.
unsafe impl Send for Operation {}

#[repr(C)]
struct Head {
    /// Ranks that have opened the file.
    attached: AtomicU32,
    /// Ranks that have arrived at the current barrier.
    arrived: AtomicU32,
    /// Barriers that all ranks have passed.
    barriers: AtomicU32,
    /// Set when a rank has failed or aborted.
    ended: AtomicU32,
    /// Changes for which a rank may wait.
    changes: AtomicU32,
    /// A description of the call of every rank.
    calls: [AtomicU64; MAX_RANKS],
    /// The mailboxes from every rank to every rank.
    mailboxes: [[Mailbox; MAX_RANKS]; MAX_RANKS],
}

/// The state of a part that one rank sends to another, chunk by chunk.
#[repr(C)]
struct Mailbox {
    /// Bytes of the whole part.
    total: AtomicU64,
    /// Bytes of the chunk in the mailbox, or 0 if the mailbox is empty.
    filled: AtomicU64,
}

pub struct Comm {
    map: MmapRaw,
    name: String,
    rank: usize,
    size: usize,
    splits: AtomicU32,
    /// Groups of calls that were launched and not carried out.
    pending: AtomicU32,
    state: Mutex<(Code, String)>,
}

impl Comm {
    pub fn open(name: String, rank: usize, size: usize) -> Result<Self, String> {
        if rank >= size || size > MAX_RANKS {
            return Err(format!("rank {rank} of {size}"));
        }
        let path = Self::path(&name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(|error| error.to_string())?;
        let length = size_of::<Head>() + size * SLOT;
        file.set_len(length as u64).map_err(|error| error.to_string())?;
        let map =
            MmapOptions::new().len(length).map_raw(&file).map_err(|error| error.to_string())?;
        let state = Mutex::new((Code::Success, String::new()));
        let comm = Self {
            map,
            name,
            rank,
            size,
            splits: AtomicU32::new(0),
            pending: AtomicU32::new(0),
            state,
        };
        if comm.head().attached.fetch_add(1, Ordering::SeqCst) as usize + 1 == size {
            fs::remove_file(path).ok(); // all ranks have mapped the file
        }
        Ok(comm)
    }

    fn path(name: &str) -> PathBuf {
        PathBuf::from("/dev/shm").join(format!("distmuon-test-nccl-{name}"))
    }

    fn head(&self) -> &Head {
        // SAFETY: the file begins with a head. A new file contains zeros, which are a valid head.
        unsafe { &*self.map.as_ptr().cast::<Head>() }
    }

    fn slot(&self, rank: usize) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(size_of::<Head>() + rank * SLOT)
    }

    /// Returns the bytes that this rank sends to other ranks for a call. For a collective, these
    /// are the bytes of a ring.
    pub fn sent(&self, operation: &Operation) -> usize {
        let Operation { kind, count, dtype, peer, .. } = *operation;
        let (bytes, others) = (count * width(dtype), self.size - 1);
        match kind {
            Kind::AllReduce => 2 * others * bytes / self.size,
            Kind::ReduceScatter | Kind::AllGather => others * bytes,
            // The last rank of the ring sends nothing.
            Kind::Broadcast if (self.rank + 1) % self.size == peer => 0,
            Kind::Send if peer == self.rank => 0,
            Kind::Broadcast | Kind::Send => bytes,
            Kind::Receive => 0,
        }
    }

    /// Returns the state of the communicator, as `ncclCommGetAsyncError` does.
    pub fn state(&self) -> Code {
        if self.head().ended.load(Ordering::SeqCst) != 0 {
            let (code, _) = *self.state.lock().expect("no holder of the lock panics");
            return if code == Code::Success { Code::RemoteError } else { code };
        }
        let all = self.head().attached.load(Ordering::SeqCst) as usize == self.size;
        if all { Code::Success } else { Code::InProgress }
    }

    pub fn last_error(&self) -> String {
        self.state.lock().expect("no holder of the lock panics").1.clone()
    }

    pub fn abort(&self) {
        self.head().ended.store(1, Ordering::SeqCst);
        self.notify();
    }

    /// Wakes all threads that [wait for a change](Self::await_change).
    fn notify(&self) {
        let changes = &self.head().changes;
        changes.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the address is that of a counter in a map that this communicator keeps.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::syscall(libc::SYS_futex, changes.as_ptr(), libc::FUTEX_WAKE, i32::MAX)
        };
    }

    /// The number of changes before a condition is looked at.
    fn changes(&self) -> u32 {
        self.head().changes.load(Ordering::SeqCst)
    }

    /// Waits until there are other changes than those that were seen, but not for long.
    #[cfg(target_os = "linux")]
    fn await_change(&self, seen: u32) {
        let longest = libc::timespec { tv_sec: 0, tv_nsec: LONGEST_SLEEP.subsec_nanos().into() };
        let changes = self.head().changes.as_ptr();
        // SAFETY: as above, and the time lives during the call.
        unsafe { libc::syscall(libc::SYS_futex, changes, libc::FUTEX_WAIT, seen, &longest) };
    }

    #[cfg(not(target_os = "linux"))]
    fn await_change(&self, _: u32) {
        std::thread::sleep(LONGEST_SLEEP / 100);
    }

    fn end(&self, code: Code, text: String) {
        *self.state.lock().expect("no holder of the lock panics") = (code, text);
        self.abort();
    }

    /// Waits for all ranks.
    fn barrier(&self) -> Result<(), ()> {
        let head = self.head();
        let barrier = head.barriers.load(Ordering::SeqCst);
        if head.arrived.fetch_add(1, Ordering::SeqCst) as usize + 1 == self.size {
            // In this order: a rank that leaves the barrier may arrive at the next one at once.
            head.arrived.store(0, Ordering::SeqCst);
            head.barriers.fetch_add(1, Ordering::SeqCst);
            self.notify();
        }
        loop {
            let seen = self.changes();
            if head.barriers.load(Ordering::SeqCst) != barrier {
                return Ok(());
            }
            if head.ended.load(Ordering::SeqCst) != 0 {
                return Err(());
            }
            self.await_change(seen);
        }
    }

    /// Counts a group of calls that [`run`](Self::run) carries out later.
    pub fn expect(&self) {
        self.pending.fetch_add(1, Ordering::SeqCst);
    }

    pub fn run(&self, operations: &[Operation]) {
        // After a failure, other ranks may still read what this one has shared.
        if self.head().ended.load(Ordering::SeqCst) == 0 {
            self.carry_out(operations);
        }
        self.pending.fetch_sub(1, Ordering::SeqCst);
        self.notify();
    }

    /// Ends the communicator instead of carrying out a group of calls, as a network failure does.
    pub fn fail(&self) {
        self.end(Code::SystemError, "the link is down".to_owned());
        self.pending.fetch_sub(1, Ordering::SeqCst);
        self.notify();
    }

    /// Waits until all launched calls have been carried out or have failed.
    pub fn wait(&self) {
        loop {
            let seen = self.changes();
            if self.pending.load(Ordering::SeqCst) == 0 {
                return;
            }
            self.await_change(seen);
        }
    }

    /// Carries out the calls of a group. Errors are in the [`state`](Self::state).
    fn carry_out(&self, operations: &[Operation]) {
        let mut operations = operations.iter().copied();
        let mut parts = Vec::new();
        loop {
            let operation = operations.next();
            let outcome = match operation {
                Some(operation) if matches!(operation.kind, Kind::Send | Kind::Receive) => {
                    parts.push(operation);
                    Ok(())
                }
                Some(operation) => self.collective(&operation),
                None if parts.is_empty() => return,
                None => return self.exchange(&parts).unwrap_or(()),
            };
            if outcome.is_err() {
                return;
            }
        }
    }

    /// Tells the other ranks of this rank's call, before the first barrier.
    fn describe(&self, call: u64) {
        self.head().calls[self.rank].store(call, Ordering::SeqCst);
    }

    /// Compares the ranks' calls, after the first barrier. Ranks that make different calls wait for
    /// ever, as with NCCL, which compares nothing.
    fn compare(&self, call: u64) -> Result<(), ()> {
        let is_same = |rank: usize| self.head().calls[rank].load(Ordering::SeqCst) == call;
        if (0..self.size).all(is_same) {
            return Ok(());
        }
        self.await_end();
        Err(())
    }

    /// Waits until a rank ends the communicator.
    fn await_end(&self) {
        loop {
            let seen = self.changes();
            if self.head().ended.load(Ordering::SeqCst) != 0 {
                return;
            }
            self.await_change(seen);
        }
    }

    fn collective(&self, operation: &Operation) -> Result<(), ()> {
        let Operation { kind, source, target, count, dtype, peer } = *operation;
        let call =
            ((kind as u64) << 56) ^ ((dtype as u64) << 48) ^ ((peer as u64) << 40) ^ count as u64;
        self.describe(call);
        if count == 0 {
            self.barrier()?;
            self.compare(call)?;
            return self.barrier();
        }
        let (rank, size) = (self.rank, self.size);
        let scatters = kind == Kind::ReduceScatter;
        let step = if scatters { SLOT / size / 8 * 8 } else { SLOT };
        let bytes = count * width(dtype);
        for offset in (0..bytes).step_by(step) {
            let length = step.min(bytes - offset);
            let parts = if scatters { size } else { 1 };
            for part in 0..parts {
                let (from, to) = (
                    source.wrapping_add(part * bytes + offset),
                    self.slot(rank).wrapping_add(part * step),
                );
                if kind != Kind::Broadcast || rank == peer {
                    // SAFETY: the source holds `parts` times `bytes`, the slot `parts` times
                    // `step`.
                    unsafe { to.copy_from_nonoverlapping(from, length) };
                }
            }
            self.barrier()?;
            if offset == 0 {
                self.compare(call)?;
            }
            // SAFETY: every slot holds the chunks of its rank, the target has space for the result,
            // and slots and steps are aligned to eight bytes.
            unsafe {
                match kind {
                    Kind::Broadcast => {
                        target.wrapping_add(offset).copy_from(self.slot(peer), length)
                    }
                    Kind::AllGather => {
                        for from in 0..size {
                            let to = target.wrapping_add(from * bytes + offset);
                            to.copy_from(self.slot(from), length);
                        }
                    }
                    _ => {
                        let start = if scatters { rank * step } else { 0 };
                        let slots =
                            (0..size).map(|from| self.slot(from).wrapping_add(start).cast_const());
                        sum(dtype, target.wrapping_add(offset), slots, length);
                    }
                }
            }
            self.barrier()?;
        }
        Ok(())
    }

    /// Sends and receives of a group, all at the same time.
    fn exchange(&self, parts: &[Operation]) -> Result<(), ()> {
        let mut unfinished: Vec<(&Operation, usize)> = parts.iter().map(|part| (part, 0)).collect();
        while !unfinished.is_empty() {
            let seen = self.changes();
            if self.head().ended.load(Ordering::SeqCst) != 0 {
                return Err(());
            }
            let mut any_moved = false;
            for (part, done) in &mut unfinished {
                let moved = if part.kind == Kind::Send {
                    self.put(part, *done)
                } else {
                    self.take(part, *done)?
                };
                *done += moved;
                any_moved |= moved > 0;
            }
            unfinished.retain(|(part, done)| !self.is_done(part, *done));
            match any_moved {
                true => self.notify(),
                false if unfinished.is_empty() => {}
                false => self.await_change(seen),
            }
        }
        Ok(())
    }

    /// Returns the bytes of the chunks in which parts are sent.
    fn chunk(&self) -> usize {
        SLOT / self.size / 8 * 8
    }

    /// Returns the mailbox from one rank to another, and its memory.
    fn mailbox(&self, from: usize, to: usize) -> (&Mailbox, *mut u8) {
        (&self.head().mailboxes[from][to], self.slot(from).wrapping_add(to * self.chunk()))
    }

    fn is_done(&self, part: &Operation, done: usize) -> bool {
        let is_taken = || self.mailbox(self.rank, part.peer).0.filled.load(Ordering::SeqCst) == 0;
        done == part.count * width(part.dtype) && (part.kind == Kind::Receive || is_taken())
    }

    /// Copies the next chunk of a part into its mailbox, if that is empty. Returns the chunk's
    /// bytes.
    fn put(&self, part: &Operation, done: usize) -> usize {
        let bytes = part.count * width(part.dtype);
        let (mailbox, memory) = self.mailbox(self.rank, part.peer);
        if done == bytes || mailbox.filled.load(Ordering::SeqCst) != 0 {
            return 0;
        }
        let length = self.chunk().min(bytes - done);
        // SAFETY: the source holds the part. The mailbox has space for a chunk, and is empty: the
        // other rank does not access it.
        unsafe { memory.copy_from(part.source.wrapping_add(done), length) };
        mailbox.total.store(bytes as u64, Ordering::SeqCst);
        mailbox.filled.store(length as u64, Ordering::SeqCst);
        length
    }

    /// Copies the next chunk of a part out of its mailbox, if that is filled. Returns the chunk's
    /// bytes.
    fn take(&self, part: &Operation, done: usize) -> Result<usize, ()> {
        let bytes = part.count * width(part.dtype);
        let (mailbox, memory) = self.mailbox(part.peer, self.rank);
        let length = mailbox.filled.load(Ordering::SeqCst) as usize;
        if length == 0 || done == bytes {
            return Ok(0);
        }
        let announced = mailbox.total.load(Ordering::SeqCst) as usize;
        if announced != bytes {
            self.await_end();
            return Err(());
        }
        // SAFETY: the target has space for the part. The mailbox holds a chunk, and is filled: the
        // other rank does not access it.
        unsafe { part.target.wrapping_add(done).copy_from(memory, length) };
        mailbox.filled.store(0, Ordering::SeqCst);
        Ok(length)
    }

    /// Returns the communicator of the ranks with the same color.
    pub fn split(&self, color: i32, key: i32) -> Result<Self, Code> {
        self.wait();
        let offer = ((color as u64) << 32) | key as u64;
        let offers: Vec<u64> = {
            self.head().calls[self.rank].store(offer, Ordering::SeqCst);
            self.barrier().map_err(|()| self.state())?;
            let offers = (0..self.size).map(|rank| self.head().calls[rank].load(Ordering::SeqCst));
            let offers = offers.collect();
            self.barrier().map_err(|()| self.state())?;
            offers
        };
        let mut members: Vec<(u64, usize)> = offers
            .into_iter()
            .enumerate()
            .filter(|(_, offer)| (offer >> 32) as i32 == color)
            .map(|(rank, offer)| (offer, rank))
            .collect();
        members.sort_unstable();
        let rank = members
            .iter()
            .position(|(_, rank)| *rank == self.rank)
            .expect("this rank is a member of the group of its color");
        let number = self.splits.fetch_add(1, Ordering::SeqCst);
        let name = format!("{}-{number}-{color}", self.name);
        Self::open(name, rank, members.len()).map_err(|_| Code::SystemError)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // The last rank to attach removes the file, if all of them do.
        if (self.head().attached.load(Ordering::SeqCst) as usize) < self.size {
            fs::remove_file(Self::path(&self.name)).ok();
        }
    }
}

/// Returns the bytes of an element of an `ncclDataType_t`.
fn width(dtype: i32) -> usize {
    match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        4 | 5 | 8 => 8,
        _ => 4,
    }
}

/// Adds up the elements of the slots, in pairs.
///
/// # Safety
///
/// The target and all slots hold `bytes` bytes, aligned to the type.
unsafe fn sum(dtype: i32, target: *mut u8, slots: impl Iterator<Item = *const u8>, bytes: usize) {
    let slots: Vec<*const u8> = slots.collect();
    // SAFETY: the caller guarantees the lengths and alignments.
    unsafe {
        match dtype {
            6 => sum_as::<f16>(target, &slots, bytes, f16::to_f32, f16::from_f32),
            9 => sum_as::<bf16>(target, &slots, bytes, bf16::to_f32, bf16::from_f32),
            _ => sum_as::<f32>(target, &slots, bytes, |x| x, |x| x),
        }
    }
}

/// As [`sum`].
///
/// # Safety
///
/// As [`sum`].
unsafe fn sum_as<T: Copy>(
    target: *mut u8,
    slots: &[*const u8],
    bytes: usize,
    wide: fn(T) -> f32,
    narrow: fn(f32) -> T,
) {
    let length = bytes / size_of::<T>();
    // SAFETY: as for `sum`.
    unsafe {
        let target = slice::from_raw_parts_mut(target.cast::<T>(), length);
        let slots: Vec<&[T]> =
            slots.iter().map(|slot| slice::from_raw_parts(slot.cast(), length)).collect();
        for (i, target) in target.iter_mut().enumerate() {
            let mut level: Vec<f32> = slots.iter().map(|slot| wide(slot[i])).collect();
            while level.len() > 1 {
                level = level.chunks(2).map(|pair| pair.iter().sum()).collect();
            }
            *target = narrow(level[0]);
        }
    }
}
