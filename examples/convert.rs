//! A run that moves to PyTorch, or from there: `cargo run --example convert -- export FILE TO` and
//! `cargo run --example convert -- import FILE TO STEPS`, with `keller-jordan` or `megatron` behind
//! them for other optimizers than `torch.optim.Muon` and `torch.optim.AdamW`. (The momentum of
//! dion is a sum, and the one of `resume` is an average.)
//!
//! The run is the one of the example `resume`: `resume a.bpk 20`, `convert export a.bpk
//! a.safetensors`, `convert import a.safetensors b.bpk 20` and `resume b.bpk 40` end with the loss
//! of `resume a.bpk 40`.

use burn::nn::transformer::PositionWiseFeedForwardConfig;
use burn::tensor::Device;
use distmuon::exchange::{Exchange, Implementation};
use distmuon::{Error, checkpoint};

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // Its values are not read: only the names, shapes and layers count.
    let model = PositionWiseFeedForwardConfig::new(16, 64).init(&Device::default());
    let exchange = |name: Option<&&str>| -> Result<Exchange, Error> {
        let implementation = name.map_or(Ok(Implementation::Torch), |name| name.parse())?;
        if implementation == Implementation::Dion {
            refuse("dion's momentum is a sum, and that of `resume` is an average");
        }
        Ok(Exchange::new(implementation))
    };
    match arguments[..] {
        ["export", from, to, ref rest @ ..] => {
            let left_out = exchange(rest.first())?.export(from, to, &model)?;
            for difference in &left_out {
                println!("left out: {difference}");
            }
            println!("exported step {}", checkpoint::progress::<usize>(from)?);
        }
        ["import", from, to, steps, ref rest @ ..] => {
            let Ok(steps) = steps.parse::<usize>() else { refuse("STEPS is no number") };
            let exchange = exchange(rest.first())?.with_steps(steps);
            exchange.import(from, to, &model, &steps)?;
            println!("imported step {steps}");
        }
        _ => refuse("the arguments are wrong"),
    }
    Ok(())
}

fn refuse(problem: &str) -> ! {
    eprintln!("{problem}");
    eprintln!("convert export FILE TO [torch | keller-jordan | megatron]");
    eprintln!("convert import FILE TO STEPS [torch | keller-jordan | megatron]");
    std::process::exit(2)
}
