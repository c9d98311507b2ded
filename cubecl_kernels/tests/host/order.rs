//! The order of side streams with CubeCL's work, on a driver without a GPU (`driver/`) that runs
//! the operations of streams in random orders. Needs g++.
//!
//! Each case is a process of its own, since a process chooses the order once for a device.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use cubecl::client::Client;
use cubecl::cuda::CudaDevice;
use cubecl::future::{DynFut, block_on};
use cubecl::server::{Handle, ServerError};
use cubecl_core::bytes::Bytes;
use cubecl_core::environment::stream::StreamId;
use cudarc::driver::{result, sys};
use distmuon_kernels::native::{
    Claim, Element, Launch, Layout, Native, Operand, Order, Product, Refusal, SideEvent,
    SideStream, Work,
};
use distmuon_skips::skip;

use crate::{driver, sources};

/// Of CubeCL, which has 128.
const STREAMS: [StreamId; 3] =
    [StreamId { value: 101 }, StreamId { value: 102 }, StreamId { value: 103 }];

/// Numbers in a buffer.
const LENGTH: usize = 16;

const BYTES: usize = LENGTH * size_of::<u32>();

/// A difference to the values that streams wait for: they do not wait for a word.
const IGNORED: c_int = -(1 << 20);

/// Runs a case in a process of its own, on the stand-in for the driver.
fn in_process(name: &str, case: fn()) {
    if let Err(missing) = driver::run(&format!("order::{name}"), &sources(), case) {
        skip(missing);
    }
}

/// Calls a function of the stand-in with a number, and returns its code.
fn standin(name: &str, number: c_int) -> c_int {
    // SAFETY: the functions that are named here have this type.
    unsafe {
        let function = sys::culib().get::<unsafe extern "C" fn(c_int) -> c_int>(name.as_bytes());
        function.expect("the stand-in is loaded")(number)
    }
}

/// A random order of operations, as of a device that is sometimes behind the host.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }

    /// Runs some operations that can run.
    fn steps(&mut self) {
        for _ in 0..self.below(4) {
            standin("standin_step", self.next() as c_int);
        }
    }

    fn stream(&mut self) -> StreamId {
        STREAMS[self.below(STREAMS.len())]
    }
}

/// A mistake in the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mutant {
    /// The operand that is read is left out.
    NotAnOperand,
    /// CubeCL's later work does not wait.
    NoWaitAfter,
    /// A number is not incremented: waits end with the number before.
    SameNumber,
    /// No number is written, or a wrong one is waited for.
    WrongNumber,
}

/// A side stream and CubeCL's streams.
struct Device {
    /// Futures of reads borrow it.
    client: &'static Client,
    random: Random,
}

type Read = DynFut<Result<Vec<Bytes>, ServerError>>;

impl Device {
    fn new(seed: usize) -> Self {
        let client = cubecl::Device::Cuda(CudaDevice::new(0)).client();
        Self { client: Box::leak(Box::new(client)), random: Random(seed as u64) }
    }

    /// Makes a buffer with a number, by one of CubeCL's streams.
    fn write(&mut self, stream: StreamId, number: u32) -> Handle {
        let numbers = number.to_ne_bytes().repeat(LENGTH);
        let handle = stream.executes(|| self.client.create_from_slice(&numbers));
        self.random.steps();
        handle
    }

    /// Queues a copy of a buffer to the host, on one of CubeCL's streams.
    fn read(&mut self, handle: Handle) -> Read {
        let client = self.client;
        let read = self.random.stream().executes(|| client.read_async(vec![handle]));
        self.random.steps();
        Box::pin(read)
    }

    /// Queues a copy of a buffer on a side stream, and returns the copy with the event of its end.
    fn copy(
        &mut self,
        side: &SideStream,
        from: &Handle,
        mutant: Option<Mutant>,
        partner: Option<&Partner>,
    ) -> Result<(Handle, SideEvent), Refusal> {
        let thread = self.random.stream();
        thread.executes(|| {
            let to = self.client.empty(BYTES);
            let operand = |handle: &Handle| {
                let operand = Operand::new(self.client, handle);
                operand.map_err(|error| Refusal(error.to_string()))
            };
            let from = match mutant {
                Some(Mutant::NotAnOperand) => from.stream.executes(|| operand(from))?,
                _ => operand(from)?,
            };
            let to_operand = operand(&to)?;
            self.random.steps();
            side.wait_for_operands(self.client)?;
            self.random.steps();
            if let Some(partner) = partner {
                partner.queue_wait(side);
            }
            // SAFETY: both buffers have these bytes, and stay until the stream has passed the copy.
            unsafe {
                let raw = side.as_ptr().cast();
                result::memcpy_dtod_async(to_operand.address(), from.address(), BYTES, raw)
            }
            .expect("the driver copies");
            self.random.steps();
            let event = side.record().expect("the driver records events");
            if partner.is_none() && mutant != Some(Mutant::NoWaitAfter) {
                assert!(event.make_context_wait().expect("the driver waits"));
            }
            self.random.steps();
            Ok((to, event))
        })
    }
}

/// Returns the number of which a buffer is full.
fn number(read: Read) -> Result<u32, String> {
    let bytes = block_on(read).map_err(|error| error.to_string())?.remove(0);
    let numbers = bytes.chunks(4).map(|four| u32::from_ne_bytes(four.try_into().unwrap()));
    let numbers: Vec<u32> = numbers.collect();
    match numbers.iter().all(|number| *number == numbers[0]) {
        true => Ok(numbers[0]),
        false => Err(format!("a buffer is partly written: {numbers:x?}")),
    }
}

/// Another rank, which a collective waits for.
struct Partner {
    word: u64,
}

impl Partner {
    fn new() -> Self {
        // SAFETY: the word is written before it is used.
        let word = unsafe { result::malloc_sync(4) }.expect("the driver has memory");
        let partner = Self { word };
        partner.set(0);
        partner
    }

    fn set(&self, value: u32) {
        // SAFETY: it is memory of a number, and only a stream waits for it.
        unsafe { (self.word as *mut u32).write_volatile(value) };
    }

    fn queue_wait(&self, side: &SideStream) {
        // SAFETY: the word is never freed.
        unsafe { sys::cuStreamWaitValue32_v2(side.as_ptr().cast(), self.word, 1, 1) }
            .result()
            .expect("the driver waits for a value");
    }
}

fn side_stream() -> SideStream {
    let order = Order::of(0).expect("the driver works");
    SideStream::new(0, order).expect("the driver has streams")
}

/// Runs a program of copies on a side stream between CubeCL's writes and reads, in one order of
/// operations. Fails if a result is wrong, or if the host would wait for ever.
fn copies(seed: usize, mutant: Option<Mutant>) -> Result<(), String> {
    let mut device = Device::new(seed);
    let side = side_stream();
    let mut reads = vec![];
    for round in 0..4 {
        let expected = (seed * 16 + round) as u32;
        let stream = device.random.stream();
        let from = device.write(stream, expected);
        let (to, _) = device.copy(&side, &from, mutant, None).map_err(|Refusal(reason)| reason)?;
        drop(from);
        // Its memory may be that of the operand.
        let noise = device.write(stream, u32::MAX);
        reads.push((expected, device.read(to)));
        drop(noise);
    }
    for (expected, read) in reads {
        let number = number(read)?;
        if number != expected {
            return Err(format!("{number} instead of {expected}"));
        }
    }
    Ok(())
}

/// Lets CubeCL's streams write their words, and holds the operations of all streams.
fn held(
    seeds: impl Iterator<Item = usize>,
    run: impl Fn(usize) -> Result<(), String>,
) -> Result<(), String> {
    let side = side_stream();
    let client = Device::new(0).client;
    for stream in STREAMS {
        stream.executes(|| side.wait_for_operands(client)).expect("the driver works");
    }
    let mut seeds = seeds;
    standin("standin_hold", 1);
    let ran = seeds.try_for_each(|seed| run(seed).map_err(|error| format!("seed {seed}: {error}")));
    standin("standin_hold", 0);
    ran
}

fn orders_by_words() {
    assert!(matches!(side_stream().order(), Order::Operands(_)), "{}", side_stream().order());
}

#[test]
fn a_side_stream_works_between_reads_and_writes() {
    in_process("a_side_stream_works_between_reads_and_writes", || {
        orders_by_words();
        held(0..400, |seed| copies(seed, None)).unwrap();
    });
}

#[test]
fn events_of_the_context_also_order_it() {
    in_process("events_of_the_context_also_order_it", || {
        standin("standin_value_fault", IGNORED);
        let order = side_stream().order().to_string();
        assert_eq!(order, "after all work of the context, since streams do not wait for words");
        held(0..400, |seed| copies(seed, None)).unwrap();
    });
}

fn is_found(mutant: Mutant, fault: c_int) {
    orders_by_words();
    let found = held(0..400, |seed| {
        standin("standin_value_fault", fault);
        let ran = copies(seed, Some(mutant));
        standin("standin_value_fault", 0);
        ran
    });
    println!("{mutant:?}: {}", found.expect_err("the mutant is found"));
}

#[test]
fn an_operand_that_is_left_out_is_found() {
    in_process("an_operand_that_is_left_out_is_found", || is_found(Mutant::NotAnOperand, 0));
}

#[test]
fn later_work_that_does_not_wait_is_found() {
    in_process("later_work_that_does_not_wait_is_found", || is_found(Mutant::NoWaitAfter, 0));
}

#[test]
fn a_number_that_is_not_incremented_is_found() {
    in_process("a_number_that_is_not_incremented_is_found", || is_found(Mutant::SameNumber, -1));
}

#[test]
fn a_wrong_number_is_found() {
    in_process("a_wrong_number_is_found", || is_found(Mutant::WrongNumber, 1000));
}

/// A collective of each of two groups and copies, of which each needs what came before. The
/// partners arrive at the end, in either order.
fn collectives(seed: usize) -> Result<(), String> {
    let mut device = Device::new(seed);
    let groups = [(side_stream(), Partner::new()), (side_stream(), Partner::new())];
    let native = side_stream();
    let numbers = [seed as u32 * 8, seed as u32 * 8 + 1, seed as u32 * 8 + 2];
    let reason = |Refusal(reason)| reason;
    let (mut calls, mut sent) = (vec![], vec![]);
    for ((group, partner), number) in groups.iter().zip(numbers) {
        let stream = device.random.stream();
        let from = device.write(stream, number);
        calls.push(device.copy(group, &from, None, Some(partner)).map_err(reason)?);
        sent.push(from);
    }
    // An iteration meanwhile, whose result the host can have.
    let stream = device.random.stream();
    let from = device.write(stream, numbers[2]);
    let (to, _) = device.copy(&native, &from, None, None).map_err(reason)?;
    let read = device.read(to);
    let found = number(read)?;
    if found != numbers[2] {
        return Err(format!("{found} instead of {} during collectives", numbers[2]));
    }
    for (_, event) in &calls {
        assert!(!event.is_passed().expect("the driver works"), "a collective waits for a partner");
    }
    // Iterations on the results, which are waited for on the device, in a random order.
    let mut reads = vec![];
    if device.random.below(2) == 1 {
        calls.reverse();
    }
    for (result, event) in calls {
        event.make_context_wait().expect("the driver waits");
        let (to, _) = device.copy(&native, &result, None, None).map_err(reason)?;
        reads.push(device.read(to));
    }
    let first = device.random.below(2);
    for index in [first, 1 - first] {
        groups[index].1.set(1);
        device.random.steps();
    }
    // Reuse of their memory is later work, which waits for the calls.
    drop(sent);
    let mut found = reads.into_iter().map(number).collect::<Result<Vec<_>, _>>()?;
    found.sort();
    match found == numbers[..2] {
        true => Ok(()),
        false => Err(format!("{found:?} instead of {:?}", &numbers[..2])),
    }
}

#[test]
fn an_iteration_does_not_wait_for_collectives() {
    in_process("an_iteration_does_not_wait_for_collectives", || {
        orders_by_words();
        held(0..200, collectives).unwrap();
    });
}

#[test]
fn an_event_of_the_context_waits_for_collectives() {
    in_process("an_event_of_the_context_waits_for_collectives", || {
        standin("standin_value_fault", IGNORED);
        drop(side_stream());
        standin("standin_value_fault", 0);
        let stuck = held(0..1, collectives).expect_err("it waits for ever");
        println!("{stuck}");
    });
}

/// Computes `x x^T` of a matrix full of a small number by the native kernels, between CubeCL's
/// write and its read on streams of their own. Fails if the result is wrong.
fn product(device: &mut Device, native: &Native, number: f32) -> Result<(), String> {
    const ROWS: usize = 64;
    let bytes = [2 * ROWS * ROWS; 2];
    let launches = |buffers: &[u64]| {
        vec![Launch::Product(Product {
            layout: Layout::RowsColumns,
            batch: 1,
            sizes: [ROWS; 3],
            a: buffers[0],
            b: buffers[0],
            alpha: 1.0,
            addend: None,
            c: buffers[1],
            lower: true,
        })]
    };
    let work = Work { bytes: &bytes, launches: &launches, result: 1 };
    let full =
        |number: f32| half::f16::from_f32(number).to_bits().to_ne_bytes().repeat(ROWS * ROWS);
    let client = device.client;
    let x = device.random.stream().executes(|| client.create_from_slice(&full(number)));
    device.random.steps();
    let run = || {
        let c = client.empty(bytes[1]);
        let operands = [&x, &c].map(|handle| Operand::new(client, handle));
        let operands = operands.map(|operand| operand.expect("the work before has not failed"));
        // SAFETY: the buffers have these bytes, and the launch uses no others.
        let queued = unsafe { native.run(client, &work, &operands) };
        queued.map(|()| c).map_err(|not_run| format!("{not_run:?}"))
    };
    let c = device.random.stream().executes(run)?;
    device.random.steps();
    let sums = block_on(device.read(c)).map_err(|error| error.to_string())?;
    match sums[0][..] == full(ROWS as f32 * number * number) {
        true => Ok(()),
        false => Err(format!("wrong sums of {number}")),
    }
}

#[test]
fn native_kernels_run_beside_a_collective() {
    in_process("native_kernels_run_beside_a_collective", || {
        let native = Native::of(0, Element::F16).expect("the stand-in has native kernels");
        assert!(native.to_string().ends_with("after the work on their operands"), "{native}");
        let _claim = Claim::new(0).expect("nothing else has the device");
        let (group, partner) = (side_stream(), Partner::new());
        let ran = held(0..50, |seed| {
            let mut device = Device::new(seed);
            let stream = device.random.stream();
            let from = device.write(stream, 7);
            let call = device.copy(&group, &from, None, Some(&partner));
            let (result, event) = call.map_err(|Refusal(reason)| reason)?;
            for number in [1.0, 2.0, 3.0] {
                product(&mut device, native, number)?;
            }
            assert!(!event.is_passed().expect("the driver works"), "it waits for a partner");
            partner.set(1);
            event.make_context_wait().expect("the driver waits");
            let found = number(device.read(result))?;
            partner.set(0);
            if found == 7 { Ok(()) } else { Err(format!("{found} by a collective")) }
        });
        ran.unwrap();
    });
}

#[test]
fn native_kernels_are_refused_beside_a_collective_without_words() {
    in_process("native_kernels_are_refused_beside_a_collective_without_words", || {
        standin("standin_value_fault", IGNORED);
        let native = Native::of(0, Element::F16).expect("the stand-in has native kernels");
        let claim = Claim::new(0).expect("nothing else has the device");
        let Err(Refusal(reason)) = Native::of(0, Element::F16) else {
            panic!("they are not refused")
        };
        assert_eq!(
            reason,
            "ranks exchange messages on the device, which iterations would wait for, since \
             streams do not wait for words"
        );
        drop(claim);
        product(&mut Device::new(0), native, 3.0).unwrap();
    });
}

#[test]
fn a_stream_that_waits_for_ever_is_given_up() {
    in_process("a_stream_that_waits_for_ever_is_given_up", || {
        standin("standin_value_fault", 1);
        let start = Instant::now();
        let order = side_stream().order().to_string();
        assert_eq!(
            order,
            "after all work of the context, since a stream waits for a word after 5s"
        );
        assert!(start.elapsed() < Duration::from_secs(20));
    });
}
