//! AdamW and Lion, for all parameters that are not hidden matrices.
//!
//! Learning rates are relative to the step's. Several parameters are updated at once, in
//! place where there are kernels, and a gradient that is not finite leaves its parameter untouched.
//!
//! With betas `b1` and `b2`, learning rate `lr` and weight decay `w`, a step of AdamW with gradient
//! `G` is
//!
//! ```text
//! M <- b1 M + (1 - b1) G          c1 <- b1 c1 + (1 - b1)
//! V <- b2 V + (1 - b2) G^2        c2 <- b2 c2 + (1 - b2)
//! P <- (1 - lr w) P - lr (M / c1) / (sqrt(V / c2) + epsilon)
//! ```
//!
//! (Loshchilov and Hutter, <https://arxiv.org/abs/1711.05101>). The corrections `c` are the moving
//! averages of ones: the usual `1 - b^t`, but counting on the device only the steps that were
//! taken. The moments of float16 and bfloat16 parameters are float32.
//!
//! A step of AdamW is skipped if `G` is not finite, or so large that its square would make `V`
//! infinite forever: above 1.8e19 (1.3e154 for float64 parameters).
//!
//! A step of Lion is
//!
//! ```text
//! P <- (1 - lr w) P - lr sign(b1 M + (1 - b1) G)
//! M <- b2 M + (1 - b2) G
//! ```
//!
//! (Chen et al., <https://arxiv.org/abs/2302.06675>), in Burn's operations on all backends. Its
//! momentum has the parameter's type, but float32 for float16.

mod adamw_config;
mod config;
mod lion_config;
mod optimizer;

pub use adamw_config::AdamWConfig;
pub use config::ElementwiseConfig;
pub use lion_config::LionConfig;
pub(crate) use optimizer::{Elementwise, ElementwiseState};
