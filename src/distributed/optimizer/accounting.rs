//! The account of a step, on request, and its comparison with what is expected.

use super::DistModuleOptimizer;
use super::diagnostics::Diagnostics;
use super::divided_model::DividedModel;
use crate::account::Account;
use crate::distributed::plan::{BucketKind, Overlap};
use crate::distributed::trainable::UpdateKind;
use crate::error::Result;
use crate::routing::Stepped;
use crate::update::{Entries, Ledger};

/// The account of steps, on request.
#[derive(Default)]
pub struct Accounting {
    /// `true` if the account of the next step is to be kept.
    pub requested: bool,
    /// The entries of this rank for the last step whose account was requested.
    kept: Option<Entries>,
}

impl Accounting {
    /// Opens the ledger for a step, if anyone asks what it does.
    pub fn begin(&self, divided: &DividedModel) {
        let ledger = ledger(divided);
        match self.requested || divided.routing.expected().is_any() {
            true => ledger.open(self.requested),
            false => _ = ledger.close(),
        }
    }

    /// Ends a step in which the `present` parameters have a gradient on any rank.
    ///
    /// # Errors
    ///
    /// [`Error::Unexpected`](crate::Error::Unexpected).
    pub fn end(&mut self, present: &[bool], divided: &DividedModel) -> Result<()> {
        let Some(mut entries) = ledger(divided).close() else { return Ok(()) };
        // They are parts of batches, but nothing of them is changed.
        let absent = present.iter().enumerate().filter(|(_, present)| !**present);
        absent.for_each(|(index, _)| entries.remove(divided.path(index)));
        divided.check_expected(present, &entries)?;
        if std::mem::take(&mut self.requested) {
            self.kept = Some(entries);
        }
        Ok(())
    }
}

fn ledger(divided: &DividedModel) -> &Ledger {
    divided.routing.updates().ledger()
}

impl DividedModel {
    /// Compares this rank's part of a step with what is expected.
    fn check_expected(&self, present: &[bool], entries: &Entries) -> Result<()> {
        let expected = self.routing.expected();
        if !expected.is_any() {
            return Ok(());
        }
        let rank = self.world.rank();
        let owned = self.owned_matrices(rank);
        let stepped = |(index, owned): (usize, usize)| {
            let trainable = &self.trainable[index];
            Stepped {
                path: &trainable.path,
                parameter: &self.of_model(index).path,
                elements: trainable.batch().iter().product(),
                is_muon: matches!(trainable.kind, UpdateKind::Muon { .. }),
                is_present: present[index],
                owned,
                iterations: entries.iterations(&trainable.path),
            }
        };
        let step: Vec<_> = owned.into_iter().enumerate().map(stepped).collect();
        expected.check(&step, rank)
    }

    /// The number of matrices of every trained parameter that a rank owns, by the plan.
    fn owned_matrices(&self, rank: usize) -> Vec<usize> {
        let mut owned = vec![0; self.trainable.len()];
        let buckets = self.plan.buckets().iter();
        for bucket in buckets.filter(|bucket| bucket.kind == BucketKind::Matrices) {
            for Overlap { parameter: index, elements, .. } in
                bucket.overlaps(bucket.shard_range(rank))
            {
                let [_, m, n] = self.trainable[index].batch();
                owned[index] += elements.len() / (m * n);
            }
        }
        owned
    }
}

impl DistModuleOptimizer {
    /// Requests the [`account`](Self::account) of the next step. All ranks make this call;
    /// otherwise the step fails with [`Error::SettingsDiffer`](crate::Error::SettingsDiffer).
    ///
    /// It costs that step a few entries on the host. It reads nothing from the device, and steps
    /// that are not asked for write nothing.
    pub fn request_account(&mut self) {
        self.accounting.requested = true;
    }

    /// Returns what the step for which the account was [requested](Self::request_account) has done
    /// to every parameter, or `None` if no step was taken since: the optimizer, the owners, the
    /// number of matrices that were orthogonalised, and how. All ranks make this call, and get the
    /// same. It takes two messages, and does not wait for the device.
    ///
    /// For the norms of the updates, also [request](Self::request_diagnostics) the diagnostics, and
    /// pass them to [`Account::with_norms`].
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::{Device, Tensor};
    /// use distmuon::{MuonConfig, RoutingRule};
    ///
    /// let device = Device::default().autodiff();
    /// let model = LinearConfig::new(64, 256).init(&device);
    /// let config = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    /// let mut optim = config.init_batched(&model)?;
    /// let loss = model.forward(Tensor::<2>::ones([8, 64], &device)).square().mean();
    /// let grads = GradientsParams::from_grads(loss.backward(), &model);
    /// optim.request_account();
    /// optim.request_diagnostics();
    /// let model = optim.step(1e-3, model, grads)?;
    /// let account = optim.account()?.expect("it was requested");
    /// println!("{}", account.with_norms(&optim.diagnostics()?.expect("they were requested")));
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As every collective.
    pub fn account(&mut self) -> Result<Option<Account>> {
        let Some(entries) = self.accounting.kept.take() else { return Ok(None) };
        let DividedModel { world, routing, .. } = &self.divided;
        let account = |all: Vec<Entries>| {
            let by_rank: Vec<_> = all.into_iter().enumerate().collect();
            Account::new(routing, &by_rank)
        };
        world.combine_on_rank_0(&entries, account).map(Some)
    }
}

impl Account {
    /// Returns the account with the norms of the updates of the same step.
    pub fn with_norms(mut self, norms: &Diagnostics) -> Self {
        for parameter in &mut self.parameters {
            let found = norms.parameters.iter().find(|norms| norms.path == parameter.path);
            parameter.update_norm = found.map(|norms| norms.update_norm);
        }
        self
    }
}

/// Mistakes that only the crate itself can make, each made on purpose.
#[cfg(test)]
mod tests {
    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::GradientsParams;
    use burn::tensor::Tensor;

    use super::*;
    use crate::comm::World;
    use crate::distributed::DistMuonConfig;
    use crate::error::Error;
    use crate::muon::MuonConfig;
    use crate::routing::{Expectation, RoutingRule};

    const RANKS: usize = 2;

    #[derive(Module, Debug)]
    struct Net {
        layers: Vec<Linear>,
    }

    fn config() -> DistMuonConfig {
        let muon = MuonConfig::new()
            .with_rule(RoutingRule::muon("weight"))
            .expect(Expectation::OncePerStep);
        // A bucket for every two matrices.
        DistMuonConfig::new().with_muon(muon).with_bucket_mb(Some(0.0006)).with_in_flight(1)
    }

    /// The first error of a step, with an optimizer that was changed before. Also passes the other
    /// optimizer, of ranks in the reverse order.
    fn error(
        change: impl Fn(&mut DistModuleOptimizer, DistModuleOptimizer) + Sync,
    ) -> Option<Error> {
        let stepped = World::threads(World::devices(RANKS), |world| -> Result<()> {
            let linear = || LinearConfig::new(8, 8).with_bias(false).init(world.device());
            let net = world.broadcast(Net { layers: (0..4).map(|_| linear()).collect() })?;
            let mut optim = config().init(&world, &net)?;
            let reversed = world.split(0, RANKS - world.rank())?;
            change(&mut optim, config().init(&reversed, &net)?);
            let x = Tensor::<2>::ones([2, 8], world.device());
            let y = net.layers.iter().fold(x, |x, layer| layer.forward(x));
            let grads = GradientsParams::from_grads(y.square().mean().backward(), &net);
            optim.step(0.01, net, grads).map(drop)
        });
        stepped.err()
    }

    /// Asserts that a layer was not orthogonalised as often as expected.
    fn assert_counted(error: Option<Error>, expected: &str, actual: &str) {
        let Some(Error::Unexpected { parameter, rank: Some(rank), expected: text, got, .. }) =
            error
        else {
            panic!("{error:?}")
        };
        assert!(parameter.starts_with("layers.") && rank < RANKS, "{parameter} on rank {rank}");
        assert!(text.starts_with(expected) && got == actual, "{text}; {got}");
    }

    #[test]
    fn a_step_without_a_mistake_is_as_expected() {
        assert_eq!(error(|_, _| ()), None);
    }

    #[test]
    fn a_step_that_nobody_asks_about_writes_nothing() {
        let world = World::alone(World::devices(1).swap_remove(0));
        let net = Net { layers: vec![LinearConfig::new(8, 8).init(world.device())] };
        let entries = |expects: bool, asks: bool| {
            let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
            let muon = if expects { muon.expect(Expectation::OncePerStep) } else { muon };
            let mut optim = DistMuonConfig::new().with_muon(muon).init(&world, &net).unwrap();
            if asks {
                optim.request_account();
            }
            optim.accounting.begin(&optim.divided);
            let entries = ledger(&optim.divided).entries().clone();
            entries.map(|entries| entries.has_details())
        };
        assert_eq!(entries(false, false), None);
        assert_eq!([entries(true, false), entries(true, true)], [Some(false), Some(true)]);
        assert_eq!(entries(false, true), Some(true));
    }

    #[test]
    fn an_iteration_that_is_left_out_is_found() {
        let found = error(|optim, _| {
            let stage = optim.traffic.stages.iter_mut().find(|stage| !stage.exchanges);
            stage.expect("a stage of matrices").buckets.clear();
        });
        assert_counted(found, "1 orthogonalisations", "0");
    }

    #[test]
    fn an_iteration_that_is_done_twice_is_found() {
        let found = error(|optim, _| {
            let stage = optim.traffic.stages.iter_mut().find(|stage| !stage.exchanges);
            let buckets = &mut stage.expect("a stage of matrices").buckets;
            buckets.push(buckets[0]);
        });
        assert_counted(found, "1 orthogonalisations", "2");
    }

    /// The weights are right, and so are the bytes that are sent.
    #[test]
    fn an_iteration_on_another_rank_than_its_owner_is_found() {
        let found = error(|optim, reversed| optim.shards = reversed.shards);
        let Some(Error::Unexpected { expected, got, .. }) = &found else { panic!("{found:?}") };
        let counts = (expected.split(' ').next().unwrap_or_default(), &**got);
        assert!(matches!(counts, ("0", "1") | ("1", "0")), "{expected}; {got}");
    }

    #[test]
    fn an_update_without_an_iteration_is_found() {
        // The ledger of another optimizer has the entries.
        let found = error(|optim, reversed| {
            let muon = reversed.divided.routing.updates().muon.clone();
            optim.shards.iter_mut().for_each(|shard| shard.set_muon(&muon));
        });
        assert_counted(found, "1 orthogonalisations", "0");
    }
}
