//! The order of side streams with CubeCL's work, on a driver without a GPU (`driver/`) that runs
//! the operations of streams in random orders. Needs g++.
//!
//! Each case is a process of its own, since a process chooses the order once for a device.

use std::time::{Duration, Instant};

use cubecl::client::Client;
use cubecl::cuda::CudaDevice;
use cubecl::future::{DynFut, block_on};
use cubecl::server::{Handle, ServerError};
use cubecl_core::bytes::Bytes;
use cubecl_core::environment::stream::StreamId;
use cudarc::driver::{result, sys};
use distmuon_kernels::native::{
    Claim, Element, Launch, Layout, Native, Product, Refusal, SideEvent, SideStream, Work,
};
use distmuon_kernels::operands::{Operand, Order};
use distmuon_skips::skip;

use crate::driver::{self, StandIn};
use crate::sources;

/// Three of the 128 streams of CubeCL.
const STREAMS: [StreamId; 3] =
    [StreamId { value: 101 }, StreamId { value: 102 }, StreamId { value: 103 }];

/// Numbers in a buffer.
const LENGTH: usize = 16;

const BYTES: usize = LENGTH * size_of::<u32>();

/// A difference to the values that streams wait for: they do not wait for a word.
const IGNORED: i32 = -(1 << 20);

/// Runs a case in a process of its own.
fn in_process(name: &str, case: fn(&StandIn)) {
    let body = || {
        result::init().expect("the stand-in starts");
        case(&StandIn::loaded());
    };
    if let Err(missing) = driver::run(&format!("order::{name}"), &sources(), body) {
        skip(missing);
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
    fn steps(&mut self, stand_in: &StandIn) {
        for _ in 0..self.below(4) {
            stand_in.step(self.next() as u32);
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

/// CubeCL's streams, and their order with side streams.
struct Device<'a> {
    /// Futures of reads borrow it.
    client: &'static Client,
    order: Order,
    random: Random,
    stand_in: &'a StandIn,
}

type Read = DynFut<Result<Vec<Bytes>, ServerError>>;

impl<'a> Device<'a> {
    fn new(seed: usize, stand_in: &'a StandIn) -> Self {
        let client = cubecl::Device::Cuda(CudaDevice::new(0)).client();
        let client = Box::leak(Box::new(client));
        Self { client, order: order(), random: Random(seed as u64), stand_in }
    }

    fn steps(&mut self) {
        self.random.steps(self.stand_in);
    }

    /// Makes a buffer with a number, by one of CubeCL's streams.
    fn write(&mut self, stream: StreamId, number: u32) -> Handle {
        let numbers = number.to_ne_bytes().repeat(LENGTH);
        let handle = stream.executes(|| self.client.create_from_slice(&numbers));
        self.steps();
        handle
    }

    /// Queues a copy of a buffer to the host, on one of CubeCL's streams.
    fn read(&mut self, handle: Handle) -> Read {
        let client = self.client;
        let read = self.random.stream().executes(|| client.read_async(vec![handle]));
        self.steps();
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
            self.steps();
            let ready = self.order.ready(self.client)?;
            self.steps();
            side.wait_for(ready).expect("the driver waits");
            self.steps();
            if let Some(partner) = partner {
                partner.queue_wait(side);
            }
            // SAFETY: both buffers have these bytes, and stay until the stream has passed the copy.
            unsafe {
                let raw = side.as_ptr().cast();
                result::memcpy_dtod_async(to_operand.address(), from.address(), BYTES, raw)
            }
            .expect("the driver copies");
            self.steps();
            let event = side.record().expect("the driver records events");
            if partner.is_none() && mutant != Some(Mutant::NoWaitAfter) {
                let waits = event.make_context_wait().expect("the driver waits");
                assert_eq!(waits, !matches!(self.order, Order::Host));
                // Where the driver has no events of contexts, the host waits, as for messages.
                while !waits && !event.is_passed().expect("the driver works") {
                    self.steps();
                }
            }
            self.steps();
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

fn order() -> Order {
    Order::of(0).expect("the driver works")
}

fn side_stream() -> SideStream {
    SideStream::new(0).expect("the driver has streams")
}

/// Runs a program of copies on a side stream between CubeCL's writes and reads, in one order of
/// operations. Fails if a result is wrong, or if the host would wait for ever.
fn copies(stand_in: &StandIn, seed: usize, mutant: Option<Mutant>) -> Result<(), String> {
    let mut device = Device::new(seed, stand_in);
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

/// Runs a program with several seeds while a test chooses the order of operations, after CubeCL's
/// streams have made their words.
fn held(
    stand_in: &StandIn,
    mut seeds: impl Iterator<Item = usize>,
    run: impl Fn(usize) -> Result<(), String>,
) -> Result<(), String> {
    let device = Device::new(0, stand_in);
    for stream in STREAMS {
        stream.executes(|| device.order.ready(device.client)).expect("the driver works");
    }
    stand_in.hold(true);
    let ran = seeds.try_for_each(|seed| run(seed).map_err(|error| format!("seed {seed}: {error}")));
    stand_in.hold(false);
    ran
}

fn orders_by_words() {
    assert!(matches!(order(), Order::Operands(_)), "{}", order());
}

#[test]
fn a_side_stream_works_between_reads_and_writes() {
    in_process("a_side_stream_works_between_reads_and_writes", |stand_in| {
        orders_by_words();
        held(stand_in, 0..400, |seed| copies(stand_in, seed, None)).unwrap();
    });
}

#[test]
fn events_of_the_context_also_order_it() {
    in_process("events_of_the_context_also_order_it", |stand_in| {
        stand_in.fault_values(IGNORED);
        let order = order().to_string();
        assert_eq!(order, "after all work of the context, since streams do not wait for words");
        held(stand_in, 0..400, |seed| copies(stand_in, seed, None)).unwrap();
    });
}

#[test]
fn with_a_driver_before_cuda_12_5_the_host_waits() {
    in_process("with_a_driver_before_cuda_12_5_the_host_waits", |stand_in| {
        stand_in.set_version(12_040);
        assert!(matches!(order(), Order::Host), "{}", order());
        held(stand_in, 0..400, |seed| copies(stand_in, seed, None)).unwrap();
    });
}

fn is_found(stand_in: &StandIn, mutant: Mutant, fault: i32) {
    orders_by_words();
    let found = held(stand_in, 0..400, |seed| {
        stand_in.fault_values(fault);
        let ran = copies(stand_in, seed, Some(mutant));
        stand_in.fault_values(0);
        ran
    });
    println!("{mutant:?}: {}", found.expect_err("the mutant is found"));
}

#[test]
fn an_operand_that_is_left_out_is_found() {
    in_process("an_operand_that_is_left_out_is_found", |stand_in| {
        is_found(stand_in, Mutant::NotAnOperand, 0)
    });
}

#[test]
fn later_work_that_does_not_wait_is_found() {
    in_process("later_work_that_does_not_wait_is_found", |stand_in| {
        is_found(stand_in, Mutant::NoWaitAfter, 0)
    });
}

#[test]
fn a_number_that_is_not_incremented_is_found() {
    in_process("a_number_that_is_not_incremented_is_found", |stand_in| {
        is_found(stand_in, Mutant::SameNumber, -1)
    });
}

#[test]
fn a_wrong_number_is_found() {
    in_process("a_wrong_number_is_found", |stand_in| is_found(stand_in, Mutant::WrongNumber, 1000));
}

/// A collective of each of two groups and copies, of which each needs what came before. The
/// partners arrive at the end, in either order.
fn collectives(stand_in: &StandIn, seed: usize) -> Result<(), String> {
    let mut device = Device::new(seed, stand_in);
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
        device.steps();
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
    in_process("an_iteration_does_not_wait_for_collectives", |stand_in| {
        orders_by_words();
        held(stand_in, 0..200, |seed| collectives(stand_in, seed)).unwrap();
    });
}

#[test]
fn an_event_of_the_context_waits_for_collectives() {
    in_process("an_event_of_the_context_waits_for_collectives", |stand_in| {
        stand_in.fault_values(IGNORED);
        order();
        stand_in.fault_values(0);
        let stuck = held(stand_in, 0..1, |seed| collectives(stand_in, seed))
            .expect_err("it waits for ever");
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
    device.steps();
    let run = || {
        let c = client.empty(bytes[1]);
        let operands = [&x, &c].map(|handle| Operand::new(client, handle));
        let operands = operands.map(|operand| operand.expect("the work before has not failed"));
        let order = Order::of_iterations(0).map_err(|Refusal(reason)| reason)?;
        let ready = order.ready(client).map_err(|Refusal(reason)| reason)?;
        let addresses = operands.each_ref().map(Operand::address);
        // SAFETY: the buffers have these bytes, and the launch uses no others.
        let queued = unsafe { native.run(ready, &work, &addresses) };
        queued.map(|()| c).map_err(|not_run| format!("{not_run:?}"))
    };
    let c = device.random.stream().executes(run)?;
    device.steps();
    let sums = block_on(device.read(c)).map_err(|error| error.to_string())?;
    match sums[0][..] == full(ROWS as f32 * number * number) {
        true => Ok(()),
        false => Err(format!("wrong sums of {number}")),
    }
}

#[test]
fn native_kernels_run_beside_a_collective() {
    in_process("native_kernels_run_beside_a_collective", |stand_in| {
        let native = Native::of(0, Element::F16).expect("the stand-in has native kernels");
        orders_by_words();
        let _claim = Claim::new(0).expect("nothing else has the device");
        let (group, partner) = (side_stream(), Partner::new());
        let ran = held(stand_in, 0..50, |seed| {
            let mut device = Device::new(seed, stand_in);
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
    in_process("native_kernels_are_refused_beside_a_collective_without_words", |stand_in| {
        stand_in.fault_values(IGNORED);
        let native = Native::of(0, Element::F16).expect("the stand-in has native kernels");
        let claim = Claim::new(0).expect("nothing else has the device");
        let Err(Refusal(reason)) = Order::of_iterations(0) else { panic!("it is not refused") };
        assert_eq!(
            reason,
            "ranks exchange messages on the device, which iterations would wait for, since \
             streams do not wait for words"
        );
        drop(claim);
        product(&mut Device::new(0, stand_in), native, 3.0).unwrap();
    });
}

#[test]
fn a_stream_that_waits_for_ever_is_given_up() {
    in_process("a_stream_that_waits_for_ever_is_given_up", |stand_in| {
        stand_in.fault_values(1);
        let start = Instant::now();
        let order = order().to_string();
        assert_eq!(
            order,
            "after all work of the context, since a stream waits for a word after 5s"
        );
        assert!(start.elapsed() < Duration::from_secs(20));
    });
}
