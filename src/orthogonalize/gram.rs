//! The Gram form: the iteration runs on `R = X X^T`, and `X` is multiplied by the accumulated `Q`
//! at the restarts and at the end (<https://github.com/Dao-AILab/gram-newton-schulz>). A single
//! step between two restarts is one of the standard form, which costs as much and rounds less.

use super::{Polynomial, standard};
use crate::backend::{Program, Step, Value};

/// Adds the polynomials, applied to the singular values of `x`, which is at most 1 in norm. `r` is
/// `X X^T`, if the program has it already. `restarts` are the steps before which `x` is brought up
/// to date. With `single_kernel`, one kernel computes `Q`.
pub fn iterate(
    program: &mut Program,
    mut x: Value,
    mut r: Option<Value>,
    schedule: &[Polynomial],
    restarts: &[usize],
    single_kernel: bool,
) -> Value {
    let segments = [&[0], restarts, &[schedule.len()]].concat();
    for segment in segments.windows(2) {
        let steps = &schedule[segment[0]..segment[1]];
        x = match steps.len() {
            1 => standard::iterate(program, x, r.take(), steps),
            _ => {
                let r = r.take().unwrap_or_else(|| program.push(Step::Square { x }));
                let q = match single_kernel {
                    true => program.push(Step::AccumulateQ { r, schedule: steps.to_vec() }),
                    false => accumulate_q(program, r, steps),
                };
                program.push(Step::Apply { q, x })
            }
        };
    }
    x
}

/// The product `Q` of all `W = Z + a I` with `Z = b R + c R^2`, where every step advances
/// `R <- W R W`. What is stored of a step is `Z / a`, so that the identity is added as it is: `a`
/// would be rounded, the same way at every restart. The first `a` is multiplied in with the second.
fn accumulate_q(program: &mut Program, mut r: Value, schedule: &[Polynomial]) -> Value {
    // `a Y (factor Z + I)`, for polynomials `Y` and `Z` of one symmetric matrix.
    let times = |y, (z, factor): (Value, f64), a| Step::Symmetric {
        a: y,
        b: z,
        c: y,
        alpha: factor * a,
        beta: a,
    };
    let mut q = None;
    for (step, &[a, b, c]) in schedule.iter().enumerate() {
        let z = program.push_polynomial(r, [b / a, c / a]);
        q = Some(program.push(match q {
            None => Step::PlusIdentity { z: z.0, factor: z.1 },
            Some(q) if step == 1 => times(q, z, schedule[0][0] * a),
            Some(q) => times(q, z, a),
        }));
        // After the last step, nothing reads `R`.
        if step + 1 < schedule.len() {
            let rz = program.push(times(r, z, a));
            r = program.push(times(rz, z, a));
        }
    }
    q.expect("a schedule has at least one step")
}
