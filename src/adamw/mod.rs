//! AdamW for all parameters that are not hidden matrices.
//!
//! Its learning rates are relative to that of the step. Several parameters are updated at once, in
//! place, and a gradient that is not finite leaves its parameter untouched.
//!
//! With betas `b1` and `b2`, learning rate `lr` and weight decay `w`, a step with gradient `G` is
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
//! A step is skipped if `G` is not finite, or so large that its square would make `V` infinite
//! forever: above 1.8e19 (1.3e154 for float64 parameters).

mod config;
mod optimizer;

pub use config::AdamWConfig;
pub(crate) use optimizer::AdamW;
