//! Audits: another rank computes matrices again, and finds bits that differ before they are
//! published.

use std::collections::BTreeMap;
use std::sync::Mutex;

use distmuon::comm::World;
use distmuon::distributed::{
    Axis, DistMuonConfig, GradDtype, Gradients, Layout, LossScaleConfig, Mesh, OnAuditFailure,
    Place, Publish,
};
use distmuon::parts::{NorMuon, Part};
use distmuon::{Error, Result, StateDtype};
use distmuon_testing::models::gradients;
use distmuon_testing::watched::{counted, replaced};
use distmuon_testing::worlds::{self, Case, cases};

use crate::{Net, config, device, owned, ranks_here, trained};

pub const EVERYWHERE: &[Case] = cases![audits_find_nothing_without_faults_and_change_no_result];

pub const IN_PROCESS: &[Case] = cases![
    a_bit_that_flips_in_a_reduced_gradient_is_found_before_it_is_published,
    what_can_not_be_audited_is_an_error,
    an_audit_costs_its_share,
];

/// Returns `true` on engines whose sums are not exact, where an audit is an error.
fn is_excused() -> bool {
    if worlds::is_exact() {
        return false;
    }
    let rejected = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        Ok(audited().init(&world, &net).map(drop).unwrap_err())
    });
    for error in rejected.unwrap() {
        let text = error.to_string();
        assert!(matches!(error, Error::Setting { .. }), "{text}");
        assert!(text.contains("`audit_every`") && text.contains("NCCL's own"), "{text}");
    }
    true
}

/// Small buckets, so that there are several.
fn audited() -> DistMuonConfig {
    config().with_bucket_mb(Some(0.002)).with_audit_every(1)
}

fn audits_find_nothing_without_faults_and_change_no_result() {
    if is_excused() {
        return;
    }
    let muon = |change: fn(distmuon::MuonConfig) -> distmuon::MuonConfig| {
        let config = audited();
        let muon = change(config.muon.clone());
        config.with_muon(muon)
    };
    let configs = [
        audited(),
        audited().with_publish(Publish::AtFirstUse),
        audited().with_gradients(Gradients::Averaged).with_in_flight(1),
        audited().with_max_norm(Some(0.1)),
        audited().with_loss_scale(Some(LossScaleConfig::new().with_initial(1.0))),
        audited().with_grad_dtype(GradDtype::Float32),
        muon(|muon| muon.with_state_dtype(StateDtype::BFloat16)),
        muon(|muon| muon.with_state_dtype(StateDtype::Int8)),
        muon(|muon| muon.with_parts(vec![Part::NorMuon(NorMuon::new(0.95))])),
    ];
    for count in [2, 3, 4].into_iter().filter(worlds::has) {
        for (index, config) in configs.iter().enumerate() {
            let steps = 12;
            let without = trained(count, steps, &config.clone().with_audit_every(0));
            assert!(trained(count, steps, config) == without, "{count} ranks, settings {index}");
        }
    }
}

/// The errors of all ranks in five steps, in which the result of a reduction of a rank is changed:
/// the one with this number.
fn errors(count: usize, faulty: (usize, usize), config: &DistMuonConfig) -> Vec<Option<Error>> {
    let errors = ranks_here(count, |world| {
        let (rank, calls) = (world.rank(), Mutex::new(0));
        let world = replaced(&world, move |collective, result| {
            if collective != "reduce_scatter" || result.dims() == [0] {
                return result;
            }
            let mut calls = calls.lock().unwrap();
            *calls += 1;
            if (rank, *calls) != faulty {
                return result;
            }
            let mut values: Vec<f32> = result.to_data().iter::<f32>().collect();
            // The largest, so that the bit is not lost in a sum.
            let largest = |a: &&mut f32, b: &&mut f32| a.abs().total_cmp(&b.abs());
            let value = values.iter_mut().max_by(largest).expect("a value");
            *value = f32::from_bits(value.to_bits() ^ 1 << 3);
            burn::tensor::Tensor::from_data(&*values, (&result.device(), result.dtype()))
        });
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config.init(&world, &net)?;
        for step in 0..5 {
            let grads = gradients(&net, step);
            match optim.step(0.01, net, grads) {
                Ok(stepped) => net = stepped,
                Err(error) => return Ok(Some(error)),
            }
        }
        Ok(None)
    });
    errors.unwrap()
}

fn a_bit_that_flips_in_a_reduced_gradient_is_found_before_it_is_published() {
    if is_excused() {
        return;
    }
    for count in [2, 3] {
        for faulty in 0..count {
            // One bucket of matrices, audited in every step: the reduction for the audit is the
            // first of a step, and the owners' the second.
            for call in [1, 2] {
                let config = config().with_audit_every(1);
                for error in errors(count, (faulty, call), &config) {
                    let error = error.expect("the fault is found");
                    let Error::Audited { part, step, rank, auditor, .. } = &error else {
                        panic!("{error}")
                    };
                    let owner = if call == 1 { (faulty + count - 1) % count } else { faulty };
                    assert_eq!((*rank, *auditor), (owner, (owner + 1) % count), "{error}");
                    assert_eq!((&**part, *step), ("state `momentum`", 1), "{error}");
                }
                let warns = config.with_on_audit_failure(OnAuditFailure::Warn);
                let found = errors(count, (faulty, call), &warns);
                assert!(found.iter().all(Option::is_none), "{found:?}");
            }
        }
    }
}

fn what_can_not_be_audited_is_an_error() {
    if is_excused() {
        return;
    }
    let config = config().with_audit_every(10);
    let alone = config.init(&World::alone(device()), &Net::new(&device())).map(drop).unwrap_err();
    let text = alone.to_string();
    assert!(matches!(alone, Error::Setting { .. }), "{text}");
    assert!(text.contains("`audit_every`") && text.contains("on one rank"), "{text}");

    let without = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let muon = config.muon.clone().with_rule(distmuon::RoutingRule::adamw(""));
        let muon = distmuon::MuonConfig { expectations: vec![], ..muon };
        Ok(config.clone().with_muon(muon).init(&world, &net).map(drop).unwrap_err().to_string())
    });
    assert!(without.unwrap().iter().all(|text| text.contains("without matrices of Muon")));

    let cut = ranks_here(4, |world| {
        let mesh = Mesh::new(&world, [Axis::data("dp", 2), Axis::model("tp", 2)])?;
        let place = Place::shard(r"^tall\.weight$", "tp", 0);
        let layout = Layout::new(&mesh).with_muon(config.muon.clone()).with_place(place);
        let net = layout.shard(Net::new(world.device()))?;
        Ok(config.init_on(&layout, &net).map(drop).unwrap_err())
    });
    let owned = ranks_here(2, |world| {
        let layout = owned::layout(&world);
        let net = layout.shard(owned::Net::new(world.device()))?;
        let config = owned::config().with_audit_every(10);
        Ok(config.init_on(&layout, &net).map(drop).unwrap_err())
    });
    let reduced = ranks_here(2, |world| {
        let layout = Layout::from(&world).with_muon(config.muon.clone()).with_small_elements(64);
        let layout = layout.overlap_backward();
        let net = layout.shard(Net::new(world.device()))?;
        Ok(config.init_on(&layout, &net).map(drop).unwrap_err())
    });
    for error in [cut, owned, reduced].into_iter().flat_map(Result::unwrap) {
        let text = error.to_string();
        assert!(matches!(error, Error::Parameter { .. }), "{text}");
        assert!(text.contains("divided among ranks; set `audit_every` to 0"), "{text}");
    }
}

/// The calls, and the bytes that a rank sends, in six steps.
fn traffic(count: usize, config: &DistMuonConfig) -> BTreeMap<&'static str, usize> {
    let bytes = ranks_here(count, |world| -> Result<_> {
        let (comm, traffic) = counted(world.communicator());
        let world = World::new(comm, world.device().clone());
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config.init(&world, &net)?;
        traffic.lock().unwrap().clear();
        for step in 0..6 {
            let grads = gradients(&net, step);
            net = optim.step(0.01, net, grads)?;
        }
        let sent = traffic.lock().unwrap().clone();
        Ok(sent)
    });
    bytes.unwrap().swap_remove(0)
}

/// Six audits of the only bucket of matrices: its gradients and its states are sent once more in
/// every step, and nothing else but a few numbers.
fn an_audit_costs_its_share() {
    if is_excused() {
        return;
    }
    let (without, with) =
        (traffic(2, &config().with_audit_every(0)), traffic(2, &config().with_audit_every(1)));
    println!("without {without:?}, with {with:?}");
    assert_eq!(traffic(2, &config().with_audit_every(7)), without, "no audit is due");
    for (collective, bytes) in &with {
        let before = without.get(collective).copied().unwrap_or_default();
        match *collective {
            "reduce_scatter" => assert!((before + 1..=2 * before).contains(bytes), "{bytes}"),
            // This rank's momentum, of not all matrices.
            "all_to_all" => assert!(*bytes <= without["reduce_scatter"] + 6 * 64, "{bytes}"),
            "all_gather_bytes" => assert!(*bytes - before <= 6 * 64, "{bytes}"),
            other => assert_eq!(*bytes, before, "{other}"),
        }
    }
}
