//! Parts before the iteration.

use distmuon::MomentumConfig;
use distmuon::parts::{ColumnEquilibration, Mars, RowEquilibration};
use faer::Mat;

use super::{LAYOUTS, all_close, cases, iterated, mapped, plain, times, updates};

/// Rows scaled to the root mean square of their norms.
fn equal_rows(matrix: &Mat<f64>) -> Mat<f64> {
    let mean = matrix.norm_l2() / (matrix.nrows() as f64).sqrt();
    mapped(matrix, |i, _, x| x * mean / matrix.row(i).norm_l2())
}

fn equal_columns(matrix: &Mat<f64>) -> Mat<f64> {
    equal_rows(&matrix.transpose().to_owned()).transpose().to_owned()
}

#[test]
fn equilibration_gives_rows_or_columns_the_mean_norm() {
    let rows = plain().with_parts(vec![RowEquilibration.into()]);
    let columns = plain().with_parts(vec![ColumnEquilibration.into()]);
    let both = plain().with_parts(vec![ColumnEquilibration.into(), RowEquilibration.into()]);
    for (case, grads) in cases() {
        for layout in LAYOUTS {
            let expected = |equal: &dyn Fn(&Mat<f64>) -> Mat<f64>| {
                grads.iter().map(|grad| iterated(&equal(grad))).collect::<Vec<_>>()
            };
            all_close(&updates(&rows, &grads, layout), &expected(&equal_rows), case);
            all_close(&updates(&columns, &grads, layout), &expected(&equal_columns), case);
            let expected = expected(&|grad| equal_rows(&equal_columns(grad)));
            all_close(&updates(&both, &grads, layout), &expected, case);
        }
    }
}

#[test]
fn mars_adds_the_change_of_the_gradient_and_limits_its_norm() {
    let (gamma, mu) = (0.05, 0.9);
    let config = plain()
        .with_parts(vec![Mars::new(gamma).into()])
        .with_momentum(MomentumConfig::new().with_momentum(mu.into()));
    for (case, grads) in cases() {
        // Norms on both sides of the limit of 1.
        let sizes = [0.02, 1.0, 0.05];
        let grads: Vec<_> = grads.iter().zip(sizes).map(|(grad, size)| times(size, grad)).collect();
        let mut previous = times(0.0, &grads[0]);
        let mut momentum = previous.clone();
        let expected = grads.iter().map(|grad| {
            let change = times(gamma * mu / (1.0 - mu), &(grad - &previous));
            let corrected = grad + change;
            let corrected = times(1.0 / corrected.norm_l2().max(1.0), &corrected);
            previous = grad.clone();
            momentum = times(mu, &momentum) + times(1.0 - mu, &corrected);
            iterated(&(times(mu, &momentum) + times(1.0 - mu, &corrected)))
        });
        let expected: Vec<_> = expected.collect();
        for layout in LAYOUTS {
            all_close(&updates(&config, &grads, layout), &expected, case);
        }
    }
}
