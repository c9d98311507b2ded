//! Programs as users of Burn write them, moved to this crate as the README says: each is a module
//! with its model, its data and its loop.
//!
//! Every program trains 30 steps, saves in the middle, and continues in a new process with the bits
//! of the run that was not interrupted. Those with a loop of their own also train on two ranks,
//! with the bits of one device. All models but one are routed without a rule.
//!
//! The ignored test `losses` compares optimizers, and prints the table of
//! `docs/results/clients.md`. `blocks` prints the table of fused projections there, and
//! `first_layers` the table of first layers in `docs/guide/excluding.md`.

mod accumulation;
mod adapters;
mod client;
mod columns;
mod data;
#[cfg(feature = "train")]
mod devices;
mod experts;
mod gan;
#[cfg(feature = "train")]
mod images;
#[cfg(feature = "train")]
mod learner;
mod losses;
mod operator;
mod patches;
mod processes;
mod saved_config;
mod state_space;
#[cfg(feature = "train")]
mod text;

use client::{Entry, entry};
use distmuon::MuonConfig;
use libtest_mimic::{Arguments, Trial};

fn entries() -> Vec<Entry> {
    [loops(), learners()].concat()
}

/// Programs with a loop of their own.
fn loops() -> Vec<Entry> {
    vec![
        entry::<accumulation::Gpt>(),
        entry::<adapters::Classifier>(),
        entry::<columns::Perceptron>(),
        entry::<gan::Gan>(),
        entry::<operator::Operator>(),
        entry::<patches::Vit>(),
        entry::<saved_config::Recurrent>(),
        entry::<state_space::Mamba>(),
    ]
}

/// Programs with burn-train's `Learner`.
fn learners() -> Vec<Entry> {
    vec![
        #[cfg(feature = "train")]
        entry::<devices::Classifier>(),
        #[cfg(feature = "train")]
        entry::<images::ConvNet>(),
        #[cfg(feature = "train")]
        entry::<text::Generator>(),
    ]
}

/// Programs that need a rule, and whose losses are not compared.
fn entries_with_rules() -> Vec<Entry> {
    vec![entry::<experts::Mixture>()]
}

/// Programs without a rule, whose losses are not compared.
fn entries_without_losses() -> Vec<Entry> {
    vec![entry::<adapters::Quantized>()]
}

/// Programs with a `Learner`, whose losses are not compared.
fn learners_without_losses() -> Vec<Entry> {
    vec![
        #[cfg(feature = "train")]
        entry::<text::WithNoam>(),
    ]
}

/// All programs that need no rule.
fn entries_without_rules() -> Vec<Entry> {
    [entries(), entries_without_losses(), learners_without_losses()].concat()
}

fn main() {
    if processes::is_child() {
        return processes::run(&[entries_without_rules(), entries_with_rules()].concat());
    }
    let of_client = |(routed, client): (&str, Entry)| {
        let name = client.name;
        [
            Trial::test(format!("{name}::is_routed_{routed}"), move || {
                assert_eq!((client.roles)().trim_end(), client.expected);
                Ok(())
            }),
            Trial::test(format!("{name}::continues_in_a_new_process"), move || {
                processes::continues(name);
                Ok(())
            }),
        ]
    };
    // `tests/it/learner.rs` compares those with a `Learner`, where ranks divide the data.
    let on_ranks = [loops(), entries_without_losses(), entries_with_rules()].concat();
    let on_ranks = on_ranks.into_iter().map(|Entry { name, .. }| {
        Trial::test(format!("{name}::trains_on_two_ranks_as_on_one_device"), move || {
            processes::trains_on_ranks(name);
            Ok(())
        })
    });
    let losses = Trial::test("losses", || {
        losses::print(&entries());
        Ok(())
    });
    let without_gradients = Trial::test("a_run_without_gradients_is_reported", || {
        processes::a_run_without_gradients_is_reported();
        Ok(())
    });
    let clients = entries_without_rules().into_iter();
    let clients = clients.map(|client| ("without_a_rule", client));
    let with_rules = entries_with_rules().into_iter().map(|client| ("by_its_rule", client));
    let trials = clients.chain(with_rules).flat_map(of_client).chain(on_ranks);
    let trials = trials.chain([without_gradients]);
    let first_layers = Trial::test("first_layers", || {
        losses::print_first_layers();
        Ok(())
    });
    let blocks = Trial::test("blocks", || {
        losses::print_blocks(&entries());
        Ok(())
    });
    let by_hand = [losses, first_layers, blocks].map(|trial| trial.with_ignored_flag(true));
    let trials = trials.chain(by_hand).collect();
    #[cfg(not(feature = "train"))]
    distmuon_testing::skip("programs with a `Learner`, which need --features train");
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// The optimizers of the parameters of a model: a line for each of them, with its paths. All others
/// are vectors, or not trained.
fn roles(config: &MuonConfig, model: &impl burn::module::Module) -> String {
    let routing = config.route(model).expect("the model is routed");
    let mut lines: Vec<(String, Vec<String>)> = vec![];
    for route in routing.routes() {
        // Blocks, rather than layers that follow each other in a stack.
        let is_block = |name: &str| name.chars().all(|c| c.is_ascii_digit());
        let names: Vec<&str> = route.path.split('.').collect();
        let names = names
            .iter()
            .rev()
            .enumerate()
            .rev()
            .map(|(after, name)| if after > 1 && is_block(name) { "*" } else { name });
        let path = names.collect::<Vec<_>>().join(".");
        if ["AdamW (vector)", "-"].contains(&&*route.optimizer) {
            continue;
        }
        match lines.iter_mut().find(|(optimizer, _)| *optimizer == route.optimizer) {
            Some((_, paths)) if paths.contains(&path) => {}
            Some((_, paths)) => paths.push(path),
            None => lines.push((route.optimizer.clone(), vec![path])),
        }
    }
    let lines = lines.into_iter();
    lines.map(|(optimizer, paths)| format!("{optimizer}: {}\n", paths.join(" "))).collect()
}
