//! An iteration as a program: its products in order, whatever computes them.

use std::sync::Arc;

/// The coefficients `(a, b, c)` of one step, `p(x) = a x + b x^3 + c x^5` on every singular value.
pub type Polynomial = [f64; 3];

/// The side from which symmetric matrices multiply `X`. Formulas are written for `Left`; `Right` is
/// their transpose, and avoids transposing `X`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// `m <= n`: polynomials of `X X^T`, from the left.
    Left,
    /// `m > n`: polynomials of `X^T X`, from the right.
    Right,
}

impl Side {
    /// The side for `m` by `n` matrices.
    pub fn of([m, n]: [usize; 2]) -> Self {
        // The Gram matrix of the shorter side is the smaller one.
        if m <= n { Self::Left } else { Self::Right }
    }
}

/// The Frobenius norm of matrices that [`Rescaling::Aol`] rescales, unless they are small. It keeps
/// the squares of small rows away from the least numbers of float16, and `X X^T` below its largest.
pub(crate) const AOL_SIZE: f64 = 128.0;

/// A diagonal matrix `D`, computed from `R = X X^T`, such that no singular value of `D X` is above
/// 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rescaling {
    /// `|R|^(-1/2)` (Frobenius) on the whole diagonal: a number.
    Schatten4,
    /// `(sum_j |R_ij|)^(-1/2)` for row `i`, "almost orthogonal layers": theorem 1 of Prach and
    /// Lampert (<https://arxiv.org/abs/2208.03160>). The input has a norm of at most [`AOL_SIZE`].
    Aol,
}

/// A batch of matrices in a program: its input, or the result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Value(usize);

/// A product of a program. `X` is the input or a result of its shape; all other matrices are
/// symmetric.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// `X X^T`.
    Square { x: Value },
    /// `alpha A B + beta C`, for polynomials of one symmetric matrix.
    Symmetric { a: Value, b: Value, c: Value, alpha: f64, beta: f64 },
    /// `D X`.
    Rescaled { x: Value, r: Value, by: Rescaling },
    /// `D R D`, which is `X X^T` of the rescaled `X`.
    RescaledSquare { r: Value, by: Rescaling },
    /// `factor Z + I`.
    PlusIdentity { z: Value, factor: f64 },
    /// The matrix `Q` of the Gram form from `R`, in one kernel.
    AccumulateQ { r: Value, schedule: Vec<Polynomial> },
    /// `Q X`.
    Apply { q: Value, x: Value },
    /// `factor Z X + a X`.
    ApplyAndAdd { z: Value, x: Value, factor: f64, a: f64 },
}

impl Step {
    /// The matrices that it reads, in the order of its fields.
    pub fn operands(&self) -> impl Iterator<Item = Value> + use<> {
        // Not a vector: on a CPU, its allocation takes as long as a product of small matrices.
        let operands = match *self {
            Self::Symmetric { a, b, c, .. } => [Some(a), Some(b), Some(c)],
            Self::Rescaled { x, r, .. } => [Some(x), Some(r), None],
            Self::Apply { q, x } => [Some(q), Some(x), None],
            Self::ApplyAndAdd { z, x, .. } => [Some(z), Some(x), None],
            Self::Square { x: z }
            | Self::PlusIdentity { z, .. }
            | Self::RescaledSquare { r: z, .. }
            | Self::AccumulateQ { r: z, .. } => [Some(z), None, None],
        };
        operands.into_iter().flatten()
    }

    /// Numbers that no other step has.
    fn words(&self) -> Vec<u64> {
        let (kind, numbers) = match self {
            Self::Square { .. } => (0, vec![]),
            Self::Symmetric { alpha, beta, .. } => (1, vec![*alpha, *beta]),
            Self::Rescaled { by, .. } => (3 + *by as u64, vec![]),
            Self::RescaledSquare { by, .. } => (5 + *by as u64, vec![]),
            Self::PlusIdentity { factor, .. } => (7, vec![*factor]),
            Self::AccumulateQ { schedule, .. } => (8, schedule.concat()),
            Self::Apply { .. } => (9, vec![]),
            Self::ApplyAndAdd { factor, a, .. } => (10, vec![*factor, *a]),
        };
        // Their number, so that lists of steps differ as well.
        let begin = [kind, numbers.len() as u64].into_iter();
        let operands = self.operands().map(|value| value.0 as u64);
        begin.chain(operands).chain(numbers.into_iter().map(f64::to_bits)).collect()
    }

    /// Returns `true` if its result has the shape of the input; otherwise it is symmetric.
    pub fn is_wide(&self) -> bool {
        matches!(self, Self::Apply { .. } | Self::ApplyAndAdd { .. } | Self::Rescaled { .. })
    }
}

/// The products that compute an iteration. The last one has its result.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Program {
    steps: Vec<Step>,
}

impl Program {
    /// The batch that the program is given.
    pub const INPUT: Value = Value(0);

    /// Adds a product, and returns its result.
    pub fn push(&mut self, step: Step) -> Value {
        self.steps.push(step);
        Value(self.steps.len())
    }

    /// Adds `c R^2 + b R`, and returns it as a matrix with a factor. A cubic polynomial has no
    /// product to compute: it is `R` with the factor `b`.
    pub fn push_polynomial(&mut self, r: Value, [b, c]: [f64; 2]) -> (Value, f64) {
        match c {
            0.0 => (r, b),
            _ => (self.push(Step::Symmetric { a: r, b: r, c: r, alpha: c, beta: b }), 1.0),
        }
    }

    #[cfg(test)]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Runs the program on a batch. `compute` returns the result of a step from its operands. A
    /// matrix is dropped after the last product that reads it, or moved into that product.
    pub fn run<M: Clone>(&self, x: M, mut compute: impl FnMut(&Step, Vec<M>) -> M) -> M {
        let (mut values, last_readers) = (vec![Some(x)], self.last_readers());
        for (index, step) in self.steps.iter().enumerate() {
            let read = step
                .operands()
                .enumerate()
                .map(|(position, value)| {
                    let is_last = last_readers[value.0] == Some(index)
                        && !step.operands().skip(position + 1).any(|later| later == value);
                    let stored = &mut values[value.0];
                    // Moved to its last reader, which may then write the result into it.
                    let read = if is_last { stored.take() } else { stored.clone() };
                    read.expect("a matrix is kept until its last reader")
                })
                .collect();
            values.push(Some(compute(step, read)));
        }
        let result = values.pop().expect("a program has an input");
        result.expect("nothing reads the result")
    }

    /// For the input and for the result of every step, the index of the last step that reads it.
    fn last_readers(&self) -> Vec<Option<usize>> {
        let mut last = vec![None; self.steps.len() + 1];
        for (index, step) in self.steps.iter().enumerate() {
            step.operands().for_each(|value| last[value.0] = Some(index));
        }
        last
    }
}

/// A program with what follows from it alone, made once for all batches that it computes. Clones
/// share it.
#[derive(Debug, Clone)]
pub(crate) struct PreparedProgram(Arc<Prepared>);

#[derive(Debug)]
struct Prepared {
    program: Program,
    buffers: Buffers,
    words: Vec<u64>,
}

impl From<Program> for PreparedProgram {
    fn from(program: Program) -> Self {
        let buffers = Buffers::of(&program);
        let words = program.steps.iter().flat_map(Step::words).collect();
        Self(Arc::new(Prepared { program, buffers, words }))
    }
}

impl PreparedProgram {
    pub fn program(&self) -> &Program {
        &self.0.program
    }

    pub fn buffers(&self) -> &Buffers {
        &self.0.buffers
    }

    /// Numbers that no other program has, as a key.
    #[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code))]
    pub fn words(&self) -> &[u64] {
        &self.0.words
    }
}

/// Buffers for the matrices of a [`Program`] that writes every result to memory that no matrix in
/// use has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Buffers {
    /// For the input and for the result of every step, the index of its buffer.
    pub of_values: Vec<usize>,
    /// For every buffer, `true` if it has the shape of the input, which is in the first one.
    pub wide: Vec<bool>,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Buffers {
    /// The buffers of a program, which may overwrite its input once nothing reads it.
    pub fn of(program: &Program) -> Self {
        let (mut of_values, mut wide) = (vec![0], vec![true]);
        let last_readers = program.last_readers();
        let mut free: Vec<usize> = vec![];
        for (index, step) in program.steps.iter().enumerate() {
            // Before the operands are released: a kernel reads them while it writes.
            // Of the same size only: a small matrix in a wide buffer would keep it from a wide one.
            let reused = free.iter().position(|buffer| wide[*buffer] == step.is_wide());
            let buffer = match reused {
                Some(position) => free.swap_remove(position),
                None => {
                    wide.push(step.is_wide());
                    wide.len() - 1
                }
            };
            of_values.push(buffer);
            let is_last = |value: &Value| last_readers[value.0] == Some(index);
            for value in step.operands().filter(is_last) {
                let buffer = of_values[value.0];
                if !free.contains(&buffer) {
                    free.push(buffer);
                }
            }
        }
        Self { of_values, wide }
    }

    /// Elements of every buffer for one matrix of a shape.
    pub fn elements(&self, [m, n]: [usize; 2]) -> impl Iterator<Item = usize> {
        let symmetric = m.min(n) * m.min(n);
        self.wide.iter().map(move |wide| if *wide { m * n } else { symmetric })
    }

    /// The buffer of the result of the program.
    pub fn result(&self) -> usize {
        self.of_values[self.of_values.len() - 1]
    }

    /// The steps of the program, each with the buffers of its operands and of its result.
    pub fn steps<'a>(
        &'a self,
        program: &'a Program,
    ) -> impl Iterator<Item = (&'a Step, Vec<usize>, usize)> {
        program.steps.iter().enumerate().map(|(index, step)| {
            let operands = step.operands().map(|value| self.of_values[value.0]).collect();
            (step, operands, self.of_values[index + 1])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step on one number: the singular value of a matrix of one row.
    fn compute(step: &Step, operands: Vec<f64>) -> f64 {
        match (step, &operands[..]) {
            (Step::Square { .. }, [x]) => x * x,
            (Step::Symmetric { alpha, beta, .. }, [a, b, c]) => alpha * a * b + beta * c,
            (Step::PlusIdentity { factor, .. }, [z]) => factor * z + 1.0,
            (Step::Apply { .. }, [q, x]) => q * x,
            (Step::ApplyAndAdd { factor, a, .. }, [z, x]) => factor * z * x + a * x,
            _ => unreachable!("the program has no such step"),
        }
    }

    /// `(Y^2 / 2 + 1) (12 X^2 + 1) Y` with `Y = 2 X^3`, from more matrices than are in use at a
    /// time.
    fn program() -> Program {
        let mut program = Program::default();
        let r = program.push(Step::Square { x: Program::INPUT });
        let z = program.push(Step::Symmetric { a: r, b: r, c: r, alpha: 0.0, beta: 2.0 });
        let x = program.push(Step::Apply { q: z, x: Program::INPUT });
        let s = program.push(Step::Square { x });
        let t = program.push(Step::Symmetric { a: s, b: s, c: r, alpha: 0.0, beta: 3.0 });
        let u = program.push(Step::Symmetric { a: t, b: t, c: s, alpha: 0.0, beta: 1.0 });
        let u = program.push(Step::PlusIdentity { z: u, factor: 0.5 });
        let y = program.push(Step::ApplyAndAdd { z: t, x, factor: 4.0, a: 1.0 });
        program.push(Step::Apply { q: u, x: y });
        program
    }

    #[test]
    fn programs_compute_their_formulas() {
        let x: f64 = 0.5;
        let (r, y) = (x * x, 2.0 * x.powi(3));
        let expected = (0.5 * y * y + 1.0) * (12.0 * r * y + y);
        assert_eq!(program().run(x, compute), expected);
    }

    #[test]
    fn words_tell_programs_apart() {
        let input = Program::INPUT;
        let of = |steps: &[Step]| {
            let mut program = Program::default();
            for step in steps {
                program.push(step.clone());
            }
            PreparedProgram::from(program)
        };
        let square = Step::Square { x: input };
        let symmetric =
            |beta| Step::Symmetric { a: Value(1), b: Value(1), c: Value(1), alpha: 0.5, beta };
        let rescaled = |by| {
            [Step::Rescaled { x: input, r: Value(1), by }, Step::RescaledSquare { r: Value(1), by }]
        };
        let accumulated = |schedule: &[Polynomial]| Step::AccumulateQ {
            r: Value(1),
            schedule: schedule.to_vec(),
        };
        let sum = |factor| Step::PlusIdentity { z: Value(1), factor };
        let applied = |factor, a| Step::ApplyAndAdd { z: Value(1), x: input, factor, a };
        let second = [
            vec![symmetric(0.25), symmetric(-0.25), sum(1.0), sum(0.5)],
            [Rescaling::Schatten4, Rescaling::Aol].map(rescaled).concat(),
            vec![accumulated(&[[1.0; 3]]), accumulated(&[[1.0; 3], [1.0; 3]])],
            vec![Step::Apply { q: Value(1), x: input }, Step::Apply { q: Value(1), x: Value(1) }],
            vec![applied(1.0, 2.0), applied(2.0, 1.0), square.clone()],
        ];
        let mut programs = vec![of(&[]), of(std::slice::from_ref(&square))];
        programs.extend(second.concat().into_iter().map(|step| of(&[square.clone(), step])));
        for (index, program) in programs.iter().enumerate() {
            assert_eq!(program.words(), of(program.program().steps()).words());
            for other in &programs[..index] {
                assert_ne!(program.words(), other.words(), "{program:?} and {other:?}");
            }
        }
    }

    #[test]
    fn programs_run_in_their_buffers() {
        let program = program();
        let buffers = Buffers::of(&program);
        assert!(buffers.wide.len() < 8, "{buffers:?}");
        let mut memory = vec![f64::NAN; buffers.wide.len()];
        memory[buffers.of_values[0]] = 0.5;
        for (step, operands, result) in buffers.steps(&program) {
            assert!(!operands.contains(&result), "{step:?} overwrites what it reads");
            assert_eq!(buffers.wide[result], step.is_wide());
            let operands = operands.iter().map(|buffer| memory[*buffer]).collect();
            memory[result] = compute(step, operands);
        }
        assert_eq!(memory[buffers.result()], program.run(0.5, compute));
    }
}
