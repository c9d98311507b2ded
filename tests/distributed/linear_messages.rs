//! Small messages of a training loop: none sends the values of all ranks to all ranks, which would
//! grow with the square of their number.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::optim::AdafactorConfig;
use distmuon::checkpoint::Saver;
use distmuon::comm::World;
use distmuon::distributed::{DistMuonConfig, Layout};
use distmuon::{MuonConfig, Result, RoutingRule};
use distmuon_testing::watched::watched;
use distmuon_testing::worlds::{Case, Folder, cases};

use crate::owned::{Net, config, tokens, with_checkpoints};
use crate::{loads_states, ranks_here};

pub const IN_PROCESS: &[Case] =
    cases![no_call_of_a_training_loop_sends_the_values_of_all_ranks_to_all];

/// The calls for small values since the last look.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<BTreeSet<&'static str>>>);

impl Calls {
    fn over(world: &World) -> (World, Self) {
        let calls = Self::default();
        let named = calls.clone();
        let world = watched(world, move |event| {
            if event.collective.ends_with("_bytes") {
                named.0.lock().unwrap().insert(event.collective);
            }
            Ok(())
        });
        (world, calls)
    }

    /// Fails if one of them was from all ranks to all. `names` are some that have to be there.
    fn ensure(&self, what: &str, names: &[&'static str]) {
        let calls = std::mem::take(&mut *self.0.lock().unwrap());
        assert!(!calls.contains("all_gather_bytes"), "{what}: {calls:?}");
        assert!(names.iter().all(|name| calls.contains(name)), "{what}: {calls:?}");
    }
}

/// The configuration, with an optimizer of the user's for some parameters.
fn custom() -> DistMuonConfig {
    let muon: MuonConfig = config().muon;
    let muon = muon
        .with_optimizer("adafactor", AdafactorConfig::new().build())
        .with_rule(RoutingRule::custom("^wide|^never", "adafactor"));
    config().with_muon(muon)
}

/// A training loop with every call, on one rank.
fn train(
    (world, calls): (&World, &Calls),
    layout: Layout,
    config: &DistMuonConfig,
    folder: &Path,
) -> Result<()> {
    let device = world.device();
    let (mut net, mut optim) = config.start(layout, Net::new(device))?;
    calls.ensure("start", &["broadcast_bytes"]);
    for step in 0..3 {
        let loss = net.loss(tokens(world.rank(), step, device));
        let grads = optim.backward(&loss, &net)?;
        calls.ensure("forward and backward", &[]);
        optim.request_account();
        net = optim.step(0.01, net, grads)?;
        calls.ensure("step", &["or_bytes"]);
        let account = optim.account()?.expect("the account was requested");
        assert!(account.muon_share() > 0.0);
        calls.ensure("account", &["gather_bytes", "broadcast_bytes"]);
    }
    let evaluated = net.valid().loss(tokens(world.rank(), 7, &device.clone().inner()));
    calls.ensure("evaluation", &[]);
    world.mean(evaluated.into_scalar::<f32>())?;
    calls.ensure("mean", &["gather_bytes", "broadcast_bytes"]);
    world.any(world.is_main())?;
    calls.ensure("any", &["first_bytes"]);
    for (name, saver) in [("file", Saver::new()), ("parts", Saver::new().with_parts())] {
        let (path, mut saver) = (folder.join(name), saver);
        saver.save(&path, &net, &optim, &3)?;
        saver.wait()?;
        world.comm().barrier()?;
        calls.ensure("save", &["first_bytes"]);
        let steps: i32;
        (net, optim, steps) = optim.load(&path, net)?;
        assert_eq!(steps, 3);
        calls.ensure("load", &["first_bytes"]);
    }
    Ok(())
}

fn no_call_of_a_training_loop_sends_the_values_of_all_ranks_to_all() {
    if !loads_states() {
        return;
    }
    let layouts: [fn(&World) -> Layout; 5] = [
        |world| world.into(),
        |world| Layout::from(world).overlap_backward(),
        |world| Layout::from(world).owned("dp"),
        |world| Layout::from(world).rows("dp"),
        |world| Layout::from(world).owned("dp").overlap_backward().allow_unused(),
    ];
    let checked = |config: DistMuonConfig| config.with_check_every(1);
    for (index, layout) in layouts.iter().enumerate() {
        // A divided model has no audits.
        let audits = if index == 0 { 1 } else { 0 };
        for config in [checked(config()).with_audit_every(audits), checked(custom())] {
            let folder = Folder::create();
            let run = ranks_here(3, |world| {
                let (world, calls) = Calls::over(&with_checkpoints(&world));
                let layout = layout(&world).with_small_elements(64);
                train((&world, &calls), layout, &config, folder.path())
            });
            run.unwrap();
        }
    }
}
