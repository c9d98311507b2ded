//! Audits: another rank computes matrices of a rank again, and both compare bits before any rank is
//! given the new values.
//!
//! An audit is of one bucket, and the next one of the next bucket. Every rank audits the rank
//! before it, in the batches of that rank and with its kernels, so that equal inputs have equal
//! bits. The gradients are reduced a second time, to the auditor, which also has the old values.
//! The momentum and the other states have one owner. It sends them, with checksums that it took at
//! the end of the step before: a bit that has flipped since then differs from its checksum.

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::bucket_shard::Shard;
use super::decisions::Decisions;
use super::detached_parameters::FlatTensors;
use super::divided_model::DividedModel;
use crate::checksum;
use crate::comm::{Communicator, PairCounts, Pending, World, digest};
use crate::distributed::config::{DistMuonConfig, OnAuditFailure};
use crate::distributed::plan::{Bucket, BucketKind, Run};
use crate::error::{Error, Result};
use crate::flat::{self, bytes};
use crate::update::UpdateTensors;

/// The part of a parameter that is its value, in errors.
const NEW_VALUE: &str = "new value";

/// The audits of an optimizer.
pub struct Audits {
    every: usize,
    on_failure: OnAuditFailure,
    /// The buckets of matrices.
    buckets: Vec<usize>,
    /// The bucket of the next audit, and the checksums of this rank's states of it after the last
    /// step.
    kept: Option<(usize, Vec<u64>)>,
}

/// The audit of a step.
pub struct Audit {
    pub bucket: usize,
    /// The shard of the rank before this one.
    pub shard: Shard,
    /// The gradients of that shard, once they are reduced.
    pub gradients: Vec<Tensor<1>>,
    on_failure: OnAuditFailure,
    /// The checksums of this rank's own states before the step.
    before: Vec<u64>,
    /// The number of matrices of the shard.
    matrices: usize,
}

/// The decisions about the parameters of an audit, and the old values.
pub struct Again<'a> {
    pub decisions: Decisions<'a>,
    pub values: Vec<Tensor<1>>,
}

/// The first difference between an owner and its auditor.
#[derive(Serialize, Deserialize)]
struct Finding {
    parameter: String,
    part: String,
    step: usize,
    rank: usize,
    auditor: usize,
    more: usize,
}

impl Audits {
    /// The audits of a configuration.
    ///
    /// # Errors
    ///
    /// On all ranks, for a model or a world that can't be audited:
    ///
    /// - [`Error::Setting`] on one rank, with an engine whose sums are not exact, and for a model
    ///   without matrices of Muon;
    /// - [`Error::Parameter`] for a matrix that is divided among ranks.
    pub fn new(config: &DistMuonConfig, divided: &DividedModel, shards: &[Shard]) -> Result<Self> {
        let (every, on_failure) = (config.audit_every, config.on_audit_failure);
        let audits = Self { every, on_failure, buckets: vec![], kept: None };
        if every == 0 {
            return Ok(audits);
        }
        if divided.world.size() == 1 {
            let expected = "0 on one rank, since another one computes matrices again";
            return Err(Error::setting("audit_every", every, expected));
        }
        if !divided.world.comm().has_exact_sums() {
            let expected = "0 with sums of NCCL's own, whose bits may differ between ranks \
                            (`Reduction::Exact` has equal ones)";
            return Err(Error::setting("audit_every", every, expected));
        }
        let buckets = shards.iter().enumerate();
        let buckets = buckets.filter(|(_, shard)| shard.bucket.kind == BucketKind::Matrices);
        let buckets: Vec<usize> = buckets.map(|(index, _)| index).collect();
        // A backward pass that reduces gradients leaves a rank with its own shard alone.
        let is_divided = |shard: &Shard| {
            let exchange = &shard.exchange;
            exchange.is_cut()
                || !shard.is_gathered()
                || shard.bucket.placement.reduces_in_backward()
        };
        if let Some(index) = buckets.iter().find(|index| is_divided(&shards[**index])) {
            return Err(Error::parameter(
                divided.path(shards[*index].bucket.parameters[0]),
                divided.world.rank(),
                "it can't be audited: expected a matrix that every rank has whole, with its \
                 gradient, got one that is divided among ranks",
                "set `audit_every` to 0, or leave the parameter whole, without \
                 `Layout::overlap_backward`",
            ));
        }
        if buckets.is_empty() {
            let expected = "0 for a model without matrices of Muon";
            return Err(Error::setting("audit_every", every, expected));
        }
        Ok(Self { buckets, ..audits })
    }

    /// The audit of a step that begins, if one is due.
    pub fn begin(
        &mut self,
        step: usize,
        divided: &DividedModel,
        shards: &[Shard],
    ) -> Option<Audit> {
        // Taken in every step: the checksums are of the states right before the next one.
        let kept = self.kept.take();
        let bucket = self.due(step)?;
        let shard = shards[bucket].of_previous_rank(divided);
        Some(Audit {
            bucket,
            gradients: vec![],
            on_failure: self.on_failure,
            // Without earlier ones, as after a load, the present ones.
            before: kept
                .filter(|(kept, _)| *kept == bucket)
                .map_or_else(|| sums(&shards[bucket]), |(_, sums)| sums),
            matrices: matrices(&shard.bucket, divided),
            shard,
        })
    }

    /// Ends a step: takes the checksums of what the next one will audit.
    pub fn end(&mut self, next: usize, shards: &[Shard]) {
        self.kept = self.due(next).map(|bucket| (bucket, sums(&shards[bucket])));
    }

    /// Forgets the checksums: the states are others now.
    pub fn forget(&mut self) {
        self.kept = None;
    }

    /// The bucket that is audited in a step, counted from one.
    fn due(&self, step: usize) -> Option<usize> {
        let audit = step.checked_div(self.every).filter(|_| step.is_multiple_of(self.every))?;
        Some(self.buckets[(audit - 1) % self.buckets.len()])
    }
}

/// The checksums of the states of a shard.
fn sums(shard: &Shard) -> Vec<u64> {
    shard.state_sums().into_iter().map(|(_, _, sum)| sum).collect()
}

/// The number of matrices that this rank has of a bucket.
fn matrices(bucket: &Bucket, divided: &DividedModel) -> usize {
    let of_run = |run: Run| {
        let [_, m, n] = divided.trainable[run.parameter].batch();
        run.elements.len() / (m * n)
    };
    bucket.runs(divided.world.rank()).into_iter().map(of_run).sum()
}

impl Audit {
    /// Bytes of its tensors.
    pub fn bytes(&self) -> usize {
        self.shard.state_bytes() + self.gradients.iter().map(bytes).sum::<usize>()
    }

    /// Starts to send this rank's states, before its update, to its auditor.
    pub fn send_states(&self, own: &Shard, comm: &Communicator) -> Result<Pending> {
        let (rank, size) = (comm.rank(), comm.size());
        let states = own.all_states();
        let mut counts = PairCounts { sent: vec![0; size], received: vec![0; size] };
        counts.sent[(rank + 1) % size] = states.dims()[0];
        counts.received[(rank + size - 1) % size] = self.shard.all_states().dims()[0];
        comm.all_to_all(states, &counts)
    }

    /// The old values of the shard.
    pub fn values(&self, parameters: &FlatTensors) -> Vec<Tensor<1>> {
        self.shard.take(&mut parameters.references(&self.shard.bucket))
    }

    /// Sets the flags of parameters whose gradients are not usable.
    pub fn reject(&self, flags: Tensor<1>) -> Tensor<1> {
        self.shard.reject(&self.gradients, flags)
    }

    /// Computes the shard again, and compares it with its owner's. `own` is this rank's shard after
    /// its update, and `updated` has its new values.
    ///
    /// # Errors
    ///
    /// [`Error::Audited`] on all ranks, unless failures are warnings; as every collective.
    pub fn compare(
        mut self,
        own: &Shard,
        updated: &[Tensor<1>],
        Again { decisions, values }: Again<'_>,
        divided: &DividedModel,
    ) -> Result<()> {
        // Before the update changes the states, whose checksums are compared as well.
        let mut found = self.shard.state_sums();
        let gradients = std::mem::take(&mut self.gradients);
        let mut diverged = flat::zeros(self.matrices, DType::F32, &divided.device());
        let tensors = UpdateTensors { gradients, values };
        let again = self.shard.update(tensors, decisions, &mut diverged, None);
        found.extend(results(&self.shard, &again));
        let mut owned = self.before;
        owned.extend(results(own, updated).into_iter().map(|(_, _, sum)| sum));
        let Some(finding) = first_difference(&divided.world, &owned, &found, |index| {
            (divided.path(index).to_owned(), decisions.inputs.times[index] + 1)
        })?
        else {
            return Ok(());
        };
        let error = Error::from(finding);
        match self.on_failure {
            OnAuditFailure::Stop => Err(error),
            OnAuditFailure::Warn => {
                if divided.world.is_main() {
                    log::warn!("{error}");
                }
                Ok(())
            }
        }
    }
}

/// The checksums after a step: of each parameter, its index, its part and the checksum.
fn results(shard: &Shard, updated: &[Tensor<1>]) -> Vec<(usize, &'static str, u64)> {
    let values = shard.parameters().zip(updated);
    let values =
        values.map(|((index, _), values)| (index, NEW_VALUE, checksum::of_bits(values.clone())));
    shard.state_sums().into_iter().chain(values).collect()
}

/// Compares the checksums of every owner with those that the next rank has `found`. Returns the
/// first difference on all ranks.
fn first_difference(
    world: &World,
    owned: &[u64],
    found: &[(usize, &'static str, u64)],
    named: impl Fn(usize) -> (String, usize),
) -> Result<Option<Finding>> {
    let (rank, size) = (world.rank(), world.size());
    let again: Vec<u64> = found.iter().map(|(_, _, sum)| *sum).collect();
    // Of several owners the lowest one, whoever audits it.
    let differs = |digests: Vec<[u64; 2]>| {
        (0..size).find(|owner| digests[*owner][0] != digests[(*owner + 1) % size][1])
    };
    let differs = world.combine_on_rank_0(&[digest(owned), digest(&*again)], differs)?;
    let Some(owner) = differs else { return Ok(None) };
    // Only now: the list has several numbers for every matrix.
    let owned = world.broadcast_value(&owned.to_vec(), owner)?;
    let auditor = (owner + 1) % size;
    let finding = (rank == auditor).then(|| finding(&owned, found, owner, world, named));
    world.broadcast_value(&finding, auditor)
}

/// The first difference between the checksums of an owner and those that its auditor has found,
/// which are as many: the same states and values of the same shard. `auditor` makes this call.
fn finding(
    owned: &[u64],
    found: &[(usize, &'static str, u64)],
    owner: usize,
    auditor: &World,
    named: impl Fn(usize) -> (String, usize),
) -> Finding {
    let differs: Vec<usize> =
        (0..found.len()).filter(|index| owned.get(*index) != Some(&found[*index].2)).collect();
    let first = *differs.first().expect("digests differ by a checksum");
    let (index, part, _) = found[first];
    // The states before the step come first, and are as many as those after it.
    let states = found.iter().filter(|(_, part, _)| *part != NEW_VALUE).count();
    let part = match part {
        NEW_VALUE => part.to_owned(),
        _ if first < states / 2 => format!("state `{part}` before the step"),
        _ => format!("state `{part}`"),
    };
    let ((parameter, step), more) = (named(index), differs.len() - 1);
    Finding { parameter, part, step, rank: owner, auditor: auditor.rank(), more }
}

impl From<Finding> for Error {
    fn from(Finding { parameter, part, step, rank, auditor, more }: Finding) -> Self {
        Self::Audited { parameter, part, step, rank, auditor, more }
    }
}

/// Faults that only the crate itself can make, in a state and in the rules of an owner, and in the
/// weights of one rank.
#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use burn::module::{Module, Param};
    use burn::nn::Linear;
    use burn::optim::GradientsParams;
    use burn::tensor::{Device, Int};

    use super::*;
    use crate::distributed::optimizer::DistModuleOptimizer;
    use crate::muon::MuonConfig;
    use crate::orthogonalize::{Coefficients, NewtonSchulzConfig};
    use crate::routing::{Expectation, RoutingRule};
    use crate::update::WeightDecay;

    const RANKS: usize = 3;
    const STEPS: usize = 7;
    const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];

    #[derive(Module, Debug)]
    struct Net {
        layers: Vec<Linear>,
    }

    impl Net {
        fn new(device: &Device) -> Self {
            // The same in every run.
            let linear = |index: i64| {
                let weight = Tensor::<1, Int>::arange(index..index + 64, device).float().sin();
                let weight = weight.reshape([8, 8]).require_grad();
                Linear { weight: Param::from_tensor(weight), bias: None }
            };
            Self { layers: (0..6).map(linear).collect() }
        }
    }

    fn muon() -> MuonConfig {
        let iteration =
            NewtonSchulzConfig::new().with_coefficients(Coefficients::Custom(vec![COEFFICIENTS]));
        MuonConfig::new()
            .with_newton_schulz(iteration)
            .with_weight_decay(WeightDecay::Decoupled(0.1.into()))
            .with_rule(RoutingRule::muon("weight"))
            .expect(Expectation::OncePerStep)
    }

    fn config() -> DistMuonConfig {
        // A bucket for every three matrices: every rank has one of each.
        let config = DistMuonConfig::new().with_muon(muon()).with_bucket_mb(Some(0.0008));
        config.with_audit_every(1)
    }

    /// The parts of a rank that a fault may change after a step.
    struct Changed<'a> {
        optim: &'a mut DistModuleOptimizer,
        net: &'a mut Net,
        /// An optimizer of the same model with other settings.
        other: &'a DistModuleOptimizer,
    }

    /// The weights of rank 0 in a run with changes after every step. The function is also given the
    /// rank and the step.
    fn trained(
        config: &DistMuonConfig,
        other: &MuonConfig,
        change: impl Fn(Changed<'_>, usize, usize) + Sync,
    ) -> Result<Vec<u64>> {
        let weights = World::threads(World::devices(RANKS), |world| -> Result<Vec<u64>> {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config.init(&world, &net)?;
            let other = config.clone().with_muon(other.clone()).init(&world, &net)?;
            assert_eq!(optim.plan().buckets().len(), 2, "{:?}", optim.plan().buckets());
            for step in 1..=STEPS {
                let x = Tensor::<2>::ones([2, 8], world.device()) * (step as f64 / 4.0);
                let y = net.layers.iter().fold(x, |x, layer| layer.forward(x));
                let grads = GradientsParams::from_grads(y.square().mean().backward(), &net);
                net = optim.step(0.01, net, grads)?;
                let changed = Changed { optim: &mut optim, net: &mut net, other: &other };
                change(changed, world.rank(), step);
            }
            let value = |layer: &Linear| checksum::of_bits(layer.weight.val().without_autodiff());
            Ok(net.layers.iter().map(value).collect())
        });
        Ok(weights?.swap_remove(0))
    }

    /// Asserts that a change on one rank after the second step is found in a step, and named.
    fn assert_found(
        config: &DistMuonConfig,
        (faulty, audited): (usize, usize),
        part: &str,
        change: impl Fn(Changed<'_>) + Sync,
        other: &MuonConfig,
    ) {
        // The only matrix of every rank in the audited bucket.
        let audited_of: Mutex<Vec<String>> = Mutex::default();
        let found = trained(config, other, |changed, rank, step| {
            if (rank, step) == (faulty, 2) {
                let DistModuleOptimizer { divided, shards, .. } = &*changed.optim;
                let path = |rank| divided.path(shards[0].bucket.runs(rank)[0].parameter).to_owned();
                *audited_of.lock().unwrap() = (0..RANKS).map(path).collect();
                change(changed);
            }
        });
        let error = found.expect_err("a fault");
        let Error::Audited { parameter, part: found, step, rank, auditor, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*parameter, audited_of.lock().unwrap()[*rank], "{error}");
        assert_eq!((&**found, *step), (part, audited), "{error}");
        // The faulty rank is one of the two.
        assert!([*rank, *auditor].contains(&faulty), "{error}");
        assert_eq!(*auditor, (rank + 1) % RANKS, "{error}");
    }

    /// The values with another lowest bit in the last one.
    fn flipped<const D: usize>(values: Tensor<D>) -> Tensor<D> {
        let mut all: Vec<f32> = values.to_data().iter::<f32>().collect();
        let last = all.last_mut().expect("a value");
        *last = f32::from_bits(last.to_bits() ^ 1);
        Tensor::<1>::from_data(&*all, (&values.device(), DType::F32)).reshape(values.shape())
    }

    fn flip_momentum(optim: &mut DistModuleOptimizer, bucket: usize) {
        let shard = &mut optim.shards[bucket];
        let momentum = flipped(shard.state("momentum", DType::F32));
        shard.set_state("momentum", &momentum);
    }

    #[test]
    fn a_bit_that_flips_in_a_stored_momentum_is_found_before_the_step() {
        for faulty in 0..RANKS {
            // The bucket that the third step audits.
            let flip = |changed: Changed<'_>| flip_momentum(changed.optim, 0);
            let part = "state `momentum` before the step";
            assert_found(&config(), (faulty, 3), part, flip, &muon());
        }
    }

    #[test]
    fn a_bit_that_flips_in_the_weights_of_a_rank_is_found_in_the_new_values() {
        for faulty in 0..RANKS {
            // The owner and the auditor of a matrix begin with other values of it.
            let flip = |changed: Changed<'_>| {
                for layer in &mut changed.net.layers {
                    let of_layer = |weight: Tensor<2>| flipped(weight).require_grad();
                    layer.weight = layer.weight.clone().map(of_layer);
                }
            };
            assert_found(&config(), (faulty, 3), NEW_VALUE, flip, &muon());
        }
    }

    #[test]
    fn another_rule_of_an_owner_is_found_in_each_part_of_the_step() {
        let iteration = |by: f64| {
            let [a, b, c] = COEFFICIENTS;
            let coefficients = Coefficients::Custom(vec![[a * by, b, c]]);
            muon().with_newton_schulz(NewtonSchulzConfig::new().with_coefficients(coefficients))
        };
        let momentum = muon().with_momentum(crate::MomentumConfig::new().with_momentum(0.5.into()));
        let decay = muon().with_weight_decay(WeightDecay::Decoupled(0.1001.into()));
        for faulty in 0..RANKS {
            for (other, part) in [
                (momentum.clone(), "state `momentum`"),
                (iteration(1.0 + 1e-6), NEW_VALUE),
                (decay.clone(), NEW_VALUE),
            ] {
                let change = |changed: Changed<'_>| {
                    let muon = changed.other.divided.routing.updates().muon.clone();
                    changed.optim.shards.iter_mut().for_each(|shard| shard.set_muon(&muon));
                };
                assert_found(&config(), (faulty, 3), part, change, &other);
            }
        }
    }

    #[test]
    fn an_audit_that_warns_changes_nothing() {
        let run = |config: &DistMuonConfig| {
            trained(config, &muon(), |changed, rank, step| {
                if (rank, step) == (1, 2) {
                    flip_momentum(changed.optim, 0);
                }
            })
        };
        let warns = config().with_on_audit_failure(OnAuditFailure::Warn);
        assert_eq!(run(&warns).unwrap(), run(&config().with_audit_every(0)).unwrap());
        assert!(run(&config()).is_err());
    }

    /// The buckets that are audited in some steps of a run that has taken others before.
    fn audited(before: usize, steps: usize) -> Vec<Option<usize>> {
        let taken = World::threads(World::devices(2), |world| -> Result<_> {
            let net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().with_audit_every(2).init(&world, &net)?;
            let present = vec![true; optim.divided.trainable.len()];
            (0..before).for_each(|_| optim.divided.advance(&present));
            let mut buckets = vec![];
            for step in before + 1..=before + steps {
                let DistModuleOptimizer { divided, shards, checks, .. } = &mut optim;
                let number = checks.step.begin(&divided.times());
                let audit = checks.audits.begin(number, divided, shards);
                buckets.push(audit.map(|audit| audit.bucket));
                if step % 3 == 0 {
                    // Skipped, as by loss scaling, and taken again.
                    let next = checks.step.end(false);
                    checks.audits.end(next, shards);
                    assert_eq!(checks.step.begin(&divided.times()), number);
                    let again = checks.audits.begin(number, divided, shards);
                    assert_eq!(again.map(|audit| audit.bucket), buckets[buckets.len() - 1]);
                }
                let next = checks.step.end(true);
                checks.audits.end(next, shards);
                // Taken before the step that audits, and only then.
                assert_eq!(checks.audits.kept.is_some(), step % 2 == 1);
                if step % 5 > 0 {
                    divided.advance(&present); // or no parameter had a gradient
                }
            }
            Ok(buckets)
        });
        let taken = taken.unwrap();
        assert_eq!(taken[0], taken[1]);
        taken[0].clone()
    }

    #[test]
    fn audits_take_the_buckets_in_turn_also_in_a_run_that_is_often_resumed() {
        let turns = [None, Some(0), None, Some(1), None, Some(0), None, Some(1)];
        assert_eq!(audited(0, 8), turns);
        for resumed in 1..8 {
            assert_eq!(audited(resumed, 8 - resumed), turns[resumed..]);
        }
    }
}
