//! The iteration, ready to run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, FloatDType, Tensor};

use super::config::{IterationForm, NewtonSchulzConfig, Normalization};
use super::iteration_plan::{IterationPlan, Planner};
use super::{cost, gram, restarts, standard};
use crate::backend::graphs::{self, Recordings};
use crate::backend::{
    AOL_SIZE, ComputePath, KernelPolicy, NativeKernels, PartialNorms, Polynomial, PreparedProgram,
    Program, Rescaling, Step, precise_dtype,
};
use crate::checks::{ensure_size, rounds_to};
use crate::error::{Error, Result};

/// A Newton-Schulz iteration, ready to run on matrices of any shape.
#[derive(Debug, Clone)]
pub struct NewtonSchulz {
    schedule: Vec<Polynomial>,
    epsilon: f64,
    normalization: Normalization,
    planner: Planner,
    /// In bytes.
    workspace: usize,
    /// Recordings, if they are wanted.
    recordings: Option<Arc<Recordings>>,
    /// The decisions that were made, which clones share.
    decisions: Arc<IterationDecisions>,
}

/// IterationDecisions by sizes and type of matrices, for each device.
type IterationDecisions =
    Mutex<HashMap<([usize; 2], DType), Vec<(Device, Arc<IterationDecision>)>>>;

/// All that follows from the settings, and from sizes, type and device of matrices: made once. The
/// native kernels are no part of it, since a device may refuse them later.
#[derive(Debug)]
pub(crate) struct IterationDecision {
    plan: IterationPlan,
    program: PreparedProgram,
    /// The reason why native kernels have no such iterations.
    not_native: Option<String>,
}

impl NewtonSchulzConfig {
    /// Makes the iteration with these settings.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for zero steps, unusable coefficients, an `epsilon` that is negative or
    /// not finite, and for [`IterationForm::Gram`] with coefficients for which [`restarts::choose`]
    /// finds no restarts in `dtype`.
    pub fn init(&self) -> Result<NewtonSchulz> {
        let Self { coefficients, steps, epsilon, normalization, dtype, form, .. } = self;
        ensure_size("epsilon", *epsilon)?;
        let schedule = coefficients.schedule(steps.unwrap_or(coefficients.designed_steps()))?;
        let restarts: Vec<_> = dtype
            .candidates()
            .iter()
            // The search takes milliseconds, and the standard form has no restarts.
            .filter(|_| *form != IterationForm::Standard)
            .map(|dtype| (*dtype, restarts::choose(&schedule, *normalization, *dtype)))
            .collect();
        if *form == IterationForm::Gram && restarts.iter().any(|(_, restarts)| restarts.is_none()) {
            return Err(Error::setting(
                "form",
                format!("Gram with {coefficients:?} in {dtype:?}"),
                "`Auto` or `Standard`, since no restarts keep the Gram form exact with these \
                 coefficients",
            ));
        }
        // In TF32, `Q X` multiplies the rounding of `X` by all of `Q`. The standard form multiplies
        // it by `Z` only, since it adds `a X` as it is. So the Gram form is as exact as in float16,
        // also where one kernel computes `Q`, and runs only if it is asked for.
        let tf32_restarts = match form {
            IterationForm::Gram => restarts::choose(&schedule, *normalization, FloatDType::F16),
            IterationForm::Auto | IterationForm::Standard => None,
        };
        Ok(NewtonSchulz {
            planner: Planner {
                form: *form,
                dtype: *dtype,
                policy: KernelPolicy::Auto,
                steps: cost::Steps::of(&schedule),
                restarts,
                tf32_restarts,
            },
            schedule,
            epsilon: *epsilon,
            normalization: *normalization,
            workspace: self.workspace_mb * 1_000_000,
            recordings: self.graphs.then(Default::default),
            decisions: Arc::default(),
        })
    }
}

impl NewtonSchulz {
    /// Returns the implementations that may be used.
    pub fn policy(&self) -> KernelPolicy {
        self.planner.policy
    }

    /// Restricts the implementations that may be used.
    pub fn with_kernels(mut self, policy: KernelPolicy) -> Self {
        self.planner.policy = policy;
        // Clones keep theirs, which are by another policy.
        self.decisions = Arc::default();
        self
    }

    /// Returns the number of shapes that have a recording, for [`NewtonSchulzConfig::graphs`].
    pub fn recorded(&self) -> usize {
        self.recordings.as_ref().map_or(0, |recordings| recordings.count())
    }

    /// Returns `true` if the rows of a matrix are divided by different numbers.
    pub(crate) fn rescales_rows(&self) -> bool {
        self.normalization == Normalization::Aol
    }

    /// Fails for a type that a device does not support.
    pub(crate) fn ensure_supported(
        &self,
        parameter: &str,
        device: &Device,
        dtype: DType,
    ) -> Result<()> {
        let iterated = self.planner.dtype.resolve(device, dtype);
        if device.supports_dtype(iterated)
            && (dtype == iterated.into() || rounds_to(device, iterated))
        {
            return Ok(());
        }
        Err(Error::Dtype {
            parameter: parameter.to_owned(),
            device: format!("{device:?}"),
            dtype: format!("{iterated:?}"),
        })
    }

    /// Replaces every matrix `U S V^T` of the batch `[k, m, n]` by a matrix near `U V^T`, of the
    /// same type and on the same device.
    ///
    /// All sizes are accepted, including 1 and 0. A matrix with an entry that is not finite gives a
    /// matrix of NaN, and has no effect on the other matrices of the batch.
    pub fn orthogonalize(&self, batch: Tensor<3>) -> Tensor<3> {
        let dtype = batch.dtype();
        self.direction(batch, None).0.cast(dtype)
    }

    /// [`orthogonalize`](Self::orthogonalize) in the type of the iteration, with norms that may be
    /// known already, in parts that fit into the workspace. With the decision that was carried out;
    /// none for an empty batch.
    pub(crate) fn direction(
        &self,
        batch: Tensor<3>,
        norms: Option<PartialNorms>,
    ) -> (Tensor<3>, Option<Arc<IterationDecision>>) {
        if batch.shape().num_elements() == 0 {
            return (batch, None);
        }
        let (shape @ [_, m, n], device) = (batch.dims(), batch.device());
        let decision = self.decision([m, n], batch.dtype(), &device);
        let native = decision.runs_natively(shape, &device);
        (self.carry_out(&decision, native, batch, norms), Some(decision))
    }

    /// The result of a decision for a batch, by native kernels or without.
    fn carry_out(
        &self,
        decision: &Arc<IterationDecision>,
        native: bool,
        batch: Tensor<3>,
        norms: Option<PartialNorms>,
    ) -> Tensor<3> {
        let [k, m, n] = batch.dims();
        // Matrices that fit into the workspace.
        let part = (self.workspace / decision.workspace([m, n], native)).max(1);
        if part >= k {
            let replayed = (!native).then(|| self.replayed(decision, &batch, norms.as_ref()));
            return match replayed.flatten() {
                Some(replayed) => replayed,
                None => self.orthogonalize_part(decision, native, batch, norms),
            };
        }
        // Not `empty`, which Flex allocates twice. In one dimension: in more, Burn may leave gaps
        // between rows.
        let options = (&batch.device(), DType::from(decision.plan.dtype));
        let mut result = Tensor::<1>::full([k * m * n], 0.0, options).reshape([k, m, n]);
        for start in (0..k).step_by(part) {
            let range = start..(start + part).min(k);
            let norms = norms
                .as_ref()
                .map(|PartialNorms(norms)| PartialNorms(norms.clone().slice([range.clone()])));
            let matrices = batch.clone().slice([range.clone()]);
            let direction = self.orthogonalize_part(decision, native, matrices, norms);
            result = result.slice_assign([range, 0..m, 0..n], direction);
        }
        result
    }

    /// The result of a recording, if one takes less time than the launches that it replaces. Native
    /// kernels record small batches themselves.
    fn replayed(
        &self,
        decision: &Arc<IterationDecision>,
        batch: &Tensor<3>,
        norms: Option<&PartialNorms>,
    ) -> Option<Tensor<3>> {
        let recordings = self.recordings.as_ref()?;
        let is_large = batch.shape().num_elements() > graphs::MOST_ELEMENTS;
        let IterationPlan { single_kernel, path, .. } = decision.plan;
        // One kernel is one launch already.
        if is_large || single_kernel || !matches!(path, ComputePath::CubeCl { .. }) {
            return None;
        }
        recordings.run(batch, norms, |batch, norms| {
            let recorded = Self { recordings: None, ..self.clone() };
            let decision = decision.clone();
            let norms = norms.map(|PartialNorms(norms)| norms);
            Box::new(move || {
                let norms = norms.clone().map(PartialNorms);
                recorded.orthogonalize_part(&decision, false, batch.clone(), norms)
            })
        })
    }

    fn orthogonalize_part(
        &self,
        IterationDecision { plan, program, .. }: &IterationDecision,
        native: bool,
        batch: Tensor<3>,
        norms: Option<PartialNorms>,
    ) -> Tensor<3> {
        let device = batch.device();
        let precise = FloatDType::from(precise_dtype(batch.dtype()));
        // By the type before rounding, in which norms are taken.
        let norm_path = ComputePath::choose(self.planner.policy, &device, precise);
        let over_norm =
            |dtype| norm_path.normalize(batch.cast(precise), norms, self.epsilon, dtype);
        let x = match self.normalization {
            // Before it is rounded: float16 has few digits of small numbers.
            Normalization::Aol => over_norm(precise).mul_scalar(AOL_SIZE).cast(plan.dtype),
            Normalization::Frobenius | Normalization::Schatten4 => over_norm(plan.dtype),
        };
        plan.path.iterate(x, program, native)
    }

    /// The products of the iteration by a plan.
    fn program(&self, plan: &IterationPlan) -> Program {
        let (mut program, mut x, mut r) = (Program::default(), Program::INPUT, None);
        let rescaling = match self.normalization {
            Normalization::Frobenius => None,
            Normalization::Schatten4 => Some(Rescaling::Schatten4),
            Normalization::Aol => Some(Rescaling::Aol),
        };
        if let Some(by) = rescaling {
            let square = program.push(Step::Square { x });
            x = program.push(Step::Rescaled { x, r: square, by });
            r = Some(program.push(Step::RescaledSquare { r: square, by }));
        }
        let IterationPlan { restarts, single_kernel, .. } = plan;
        match plan.form {
            IterationForm::Gram => {
                gram::iterate(&mut program, x, r, &self.schedule, restarts, *single_kernel)
            }
            IterationForm::Standard | IterationForm::Auto => {
                standard::iterate(&mut program, x, r, &self.schedule)
            }
        };
        program
    }

    /// The decision about matrices of a shape, made when it is first asked for.
    fn decision(&self, shape: [usize; 2], dtype: DType, device: &Device) -> Arc<IterationDecision> {
        // Each is complete when it is stored, also after a panic.
        let mut all = self.decisions.lock().unwrap_or_else(PoisonError::into_inner);
        let of_devices = all.entry((shape, dtype)).or_default();
        let known = of_devices.iter().find(|(of, _)| graphs::is_same(of, device));
        if let Some((_, decision)) = known {
            return decision.clone();
        }
        let plan = self.planner.plan(shape, dtype, device);
        let not_native = match self.normalization {
            _ if plan.single_kernel => Some("one kernel computes all steps".to_owned()),
            Normalization::Frobenius => None,
            other => Some(format!("they have no {other:?} normalization")),
        };
        let program = self.program(&plan).into();
        let decision = Arc::new(IterationDecision { plan, program, not_native });
        of_devices.push((device.clone(), decision.clone()));
        decision
    }

    /// Returns the plan by which [`orthogonalize`](Self::orthogonalize) processes `batch`.
    pub fn explain(&self, batch: &Tensor<3>) -> IterationPlan {
        self.explained(batch.dims(), batch.dtype(), &batch.device())
    }

    /// Returns the plan for an `m` by `n` matrix of type `dtype` on `device`, without the matrix.
    pub fn explain_shape(
        &self,
        [m, n]: [usize; 2],
        dtype: DType,
        device: &Device,
    ) -> IterationPlan {
        self.explained([1, m, n], dtype, device)
    }

    /// Floating-point operations for an `m` by `n` matrix of type `dtype` on `device`. Chooses no
    /// kernel, which would have to be compiled and verified.
    pub(crate) fn operations(&self, [m, n]: [usize; 2], dtype: DType, device: &Device) -> f64 {
        self.planner.plan([m, n], dtype, device).operations
    }

    fn explained(
        &self,
        shape @ [_, m, n]: [usize; 3],
        dtype: DType,
        device: &Device,
    ) -> IterationPlan {
        self.decision([m, n], dtype, device).explained(shape, device)
    }
}

impl IterationDecision {
    /// Returns `true` if native kernels compute a batch, or are compared with others for it.
    fn runs_natively(&self, shape: [usize; 3], device: &Device) -> bool {
        let IterationPlan { path, dtype, .. } = self.plan;
        self.not_native.is_none() && path.has_native_kernels(device, dtype, shape)
    }

    /// Bytes of memory for one matrix, its result included and its input excluded.
    fn workspace(&self, [m, n]: [usize; 2], native: bool) -> usize {
        let IterationPlan { workspace, dtype, .. } = self.plan;
        if !native {
            return workspace;
        }
        // All of them at a time: the launches of an iteration are queued at once.
        let elements: usize = self.program.buffers().elements([m, n]).sum();
        workspace.max(elements * DType::from(dtype).size())
    }

    /// The whole plan for a batch, with descriptions of its kernels, which the iteration does not
    /// need.
    pub fn explained(&self, shape @ [_, m, n]: [usize; 3], device: &Device) -> IterationPlan {
        let mut plan = self.plan.clone();
        plan.native = match &self.not_native {
            Some(reason) => NativeKernels::Refused(reason.clone()),
            None => plan.path.native_kernels(device, plan.dtype, shape),
        };
        plan.workspace = self.workspace([m, n], plan.native.may_run());
        plan.kernel = plan.kernel_of(shape, device);
        plan
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "cuda")]
    use burn::tensor::Distribution;

    use super::*;
    use crate::orthogonalize::Coefficients;
    #[cfg(feature = "cuda")]
    use crate::{
        cuda_stand_in::{self, StandIn},
        orthogonalize::IterationDtype,
        skipped_tests::excused,
    };

    /// The operations of a program, by the definition of `cost`: a test of its formulas.
    fn operations(program: &Program, path: ComputePath, [m, n]: [usize; 2]) -> f64 {
        let share = |inner| path.symmetric_share(m, inner);
        let of_step = |step: &Step| match step {
            Step::Square { .. } => n as f64 * share(n),
            Step::Symmetric { .. } => m as f64 * share(m),
            Step::Apply { .. } | Step::ApplyAndAdd { .. } => n as f64,
            Step::AccumulateQ { .. } => unreachable!("no one kernel computes a large matrix"),
            Step::PlusIdentity { .. } | Step::Rescaled { .. } | Step::RescaledSquare { .. } => 0.0,
        };
        2.0 * (m * m) as f64 * program.steps().iter().map(of_step).sum::<f64>()
    }

    #[test]
    fn operations_are_those_of_the_products_that_run() {
        let sets = [Coefficients::KellerJordan, Coefficients::You, Coefficients::Cubic];
        let mut grams = 0;
        let mixed =
            Coefficients::Custom(vec![[2.0, -1.5, 0.5], [1.5, -0.5, 0.0], [2.0, -1.5, 0.5]]);
        for set in sets.into_iter().chain([mixed]) {
            for form in [IterationForm::Standard, IterationForm::Gram] {
                for normalization in [Normalization::Frobenius, Normalization::Schatten4] {
                    let config = NewtonSchulzConfig::new().with_coefficients(set.clone());
                    let config = config.with_form(form).with_normalization(normalization);
                    // Some sets have no exact Gram form.
                    let Ok(iteration) = config.init() else { continue };
                    grams += usize::from(form == IterationForm::Gram);
                    for shape in [[128, 128], [128, 512]] {
                        let plan = iteration.planner.plan(shape, DType::F32, &Device::default());
                        let ran = operations(&iteration.program(&plan), plan.path, shape);
                        let what = format!("{set:?}, {form:?}, {normalization:?}, {shape:?}");
                        assert!((plan.operations - ran).abs() < 1.0, "{what}: {ran}");
                    }
                }
            }
        }
        assert!(grams >= 4, "{grams} Gram forms");
        let squares = |set: Coefficients| {
            let config = NewtonSchulzConfig::new().with_coefficients(set);
            let iteration = config.with_form(IterationForm::Standard).init().unwrap();
            let plan = iteration.planner.plan([128, 128], DType::F32, &Device::default());
            let program = iteration.program(&plan);
            program.steps().iter().filter(|step| matches!(step, Step::Symmetric { .. })).count()
        };
        assert_eq!([Coefficients::Cubic, Coefficients::KellerJordan].map(squares), [0, 5]);
    }

    #[test]
    fn decisions_are_made_once_for_a_shape_type_and_device() {
        let iteration = NewtonSchulzConfig::new().init().unwrap();
        let device = Device::default();
        let decision =
            |iteration: &NewtonSchulz, shape, dtype| iteration.decision(shape, dtype, &device);
        let first = decision(&iteration, [24, 40], DType::F32);
        assert!(Arc::ptr_eq(&first, &decision(&iteration.clone(), [24, 40], DType::F32)));
        assert_eq!(first.plan, iteration.planner.plan([24, 40], DType::F32, &device));
        for (shape, dtype) in [([40, 24], DType::F32), ([24, 40], DType::F64)] {
            assert!(!Arc::ptr_eq(&first, &decision(&iteration, shape, dtype)));
        }
        let portable = iteration.clone().with_kernels(KernelPolicy::Portable);
        let other = decision(&portable, [24, 40], DType::F32);
        assert_eq!(other.plan.path, ComputePath::Portable);
        assert!(Arc::ptr_eq(&first, &decision(&iteration, [24, 40], DType::F32)));
    }

    #[test]
    fn native_kernels_need_two_wide_buffers_and_those_of_the_form() {
        let elements = |form, [m, n]: [usize; 2]| {
            let config = NewtonSchulzConfig::new().with_form(form);
            let iteration = config.init().unwrap();
            let plan = iteration.planner.plan([m, n], DType::F32, &Device::default());
            assert!(!plan.single_kernel && plan.form == form);
            let program = PreparedProgram::from(iteration.program(&plan));
            program.buffers().elements([m, n]).sum::<usize>()
        };
        let shape @ [m, n] = [128, 512];
        // `X` and the next one, `R` and `Z`.
        assert_eq!(elements(IterationForm::Standard, shape), 2 * m * n + 2 * m * m);
        // `Q`, `R`, `Z` and the next one of them.
        assert_eq!(elements(IterationForm::Gram, shape), 2 * m * n + 4 * m * m);
        assert_eq!(elements(IterationForm::Gram, [n, m]), 2 * m * n + 4 * m * m);
    }

    /// On a stand-in for CUDA's driver, on which native kernels compute and all others do nothing.
    #[cfg(feature = "cuda")]
    #[test]
    fn native_kernels_iterate_as_burns_operations_do() {
        let test = concat!(module_path!(), "::native_kernels_iterate_as_burns_operations_do");
        on_the_stand_in(test, compare_native_kernels);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn bits_of_native_kernels_do_not_depend_on_the_batch() {
        let test = concat!(module_path!(), "::bits_of_native_kernels_do_not_depend_on_the_batch");
        on_the_stand_in(test, || {
            for form in [IterationForm::Standard, IterationForm::Gram] {
                let config = NewtonSchulzConfig::new().with_form(form);
                let iteration = config.with_dtype(IterationDtype::Bf16).init();
                let iteration = iteration.expect("a valid configuration");
                for [m, n] in [[136, 72], [264, 200]] {
                    compare_batches(&iteration, m, n);
                }
            }
        });
    }

    #[cfg(feature = "cuda")]
    fn on_the_stand_in(test: &str, body: impl FnOnce()) {
        let (_, test) = test.split_once("::").expect("a module is in a crate");
        let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/cubecl_kernels/tests/driver");
        if let Err(missing) = cuda_stand_in::run(test, sources.as_ref(), body) {
            excused(missing);
        }
    }

    /// Compares a batch of 12 matrices with some of the same ones in smaller batches.
    #[cfg(feature = "cuda")]
    fn compare_batches(iteration: &NewtonSchulz, m: usize, n: usize) {
        let device = Device::cuda(0);
        let random = Distribution::Uniform(-0.01, 0.01);
        let x = Tensor::<3>::random([12, m, n], random, &Device::flex()).cast(FloatDType::BF16);
        let bits = |first: usize, batch: usize| {
            let matrices = first..first + batch;
            let part = x.clone().slice([matrices]).reshape([-1]).into_data();
            let shape = [batch, m, n];
            let part = Tensor::<1>::from_data(part, (&device, DType::BF16)).reshape(shape);
            let plan = iteration.explain(&part);
            assert!(matches!(plan.native, NativeKernels::Used(_)), "{:?}", plan.native);
            let program = iteration.program(&plan).into();
            let result = plan.path.iterate(part, &program, true);
            let result = result.reshape([-1]).into_data();
            result.try_to_vec::<half::bf16>().expect("values in bfloat16")
        };
        let all = bits(0, 12);
        assert!(all.iter().any(|value| value.to_f32() != 0.0), "the kernels compute");
        for (first, batch) in [(0, 3), (3, 3), (9, 3), (5, 1)] {
            assert_eq!(
                all[first * m * n..][..batch * m * n],
                bits(first, batch),
                "{batch} matrices"
            );
        }
    }

    #[cfg(feature = "cuda")]
    fn compare_native_kernels() {
        let stand_in = StandIn::loaded();
        let shapes = [[1, 72, 136], [2, 136, 72], [3, 264, 200], [1, 200, 264]];
        // Too large for a recording, and a minute if all types and forms had it.
        let large = [430, 72, 136];
        for dtype in [IterationDtype::F16, IterationDtype::Bf16] {
            for form in [IterationForm::Standard, IterationForm::Gram] {
                let config = NewtonSchulzConfig::new().with_form(form).with_dtype(dtype);
                let iteration = config.init().expect("a valid configuration");
                let is_last = dtype == IterationDtype::Bf16 && form == IterationForm::Gram;
                for shape in shapes.into_iter().chain(is_last.then_some(large)) {
                    // The first batch of a shape may be recorded, which the second one replays.
                    for seed in 0..2 {
                        compare(&iteration, shape, seed, &stand_in);
                    }
                }
            }
        }
    }

    /// Compares a batch with Burn's operations in float32 on the CPU. Of the device's work, only
    /// what the host waits for runs at first, and the rest afterwards in random order.
    #[cfg(feature = "cuda")]
    fn compare(iteration: &NewtonSchulz, shape: [usize; 3], seed: u32, stand_in: &StandIn) {
        let [_, m, n] = shape;
        let device = Device::cuda(0);
        let plan = iteration.explained(shape, DType::F32, &device);
        let NativeKernels::Used(kernels) = &plan.native else { panic!("{:?}", plan.native) };
        assert!(kernels.contains("128 x 128, 256 x 128, 128 x 256, 256 x 256;"), "{kernels}");
        let dtype = DType::from(plan.dtype);
        let bound = 1.0 / ((m * n) as f64).sqrt();
        let random = Distribution::Uniform(-bound, bound);
        let x = Tensor::<3>::random(shape, random, &Device::flex()).cast(plan.dtype);
        let program = iteration.program(&plan).into();
        let reference = x.clone().cast(FloatDType::F32);
        let expected = ComputePath::Portable.iterate(reference, &program, false);

        let before = stand_in.launches("product_");
        stand_in.hold(true);
        // In one dimension: in more, Burn may leave gaps between rows, which a kernel closes.
        let values = x.reshape([-1]).into_data();
        let batch = Tensor::<1>::from_data(values, (&device, dtype)).reshape(shape);
        let result = plan.path.iterate(batch, &program, plan.native.may_run());
        let result = result.reshape([-1]).into_data();
        for step in 0.. {
            if !stand_in.step(seed + 3 * step) {
                break;
            }
        }
        stand_in.hold(false);
        assert!(stand_in.launches("product_") > before, "the native kernels run");
        let result = Tensor::<1>::from_data(result, (&Device::flex(), DType::F32)).reshape(shape);
        let norm = |x: Tensor<3>| x.square().sum().into_scalar::<f32>().sqrt();
        let error = norm(result - expected.clone()) / norm(expected);
        println!("{shape:?} {dtype:?} {:?}: {error}", plan.form);
        let unit = if plan.dtype == FloatDType::F16 { 2f32.powi(-10) } else { 2f32.powi(-7) };
        assert!(error < 4.0 * unit, "{shape:?} {dtype:?} {:?}: {error}", plan.form);
    }
}
