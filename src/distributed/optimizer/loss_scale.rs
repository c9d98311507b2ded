//! Dynamic loss scaling.

use crate::distributed::config::LossScaleConfig;

/// The scale of the loss, which is the same on all ranks.
pub struct LossScale {
    config: LossScaleConfig,
    pub scale: f64,
    /// Steps since the scale changed.
    pub steps: usize,
}

impl LossScale {
    pub fn new(config: LossScaleConfig) -> Self {
        Self { scale: config.initial, steps: 0, config }
    }

    /// Adapts the scale after a step.
    pub fn advance(&mut self, overflowed: bool) {
        self.steps += 1;
        if overflowed {
            // The interval begins again: the scale that has just failed is not tried before it is
            // over.
            (self.scale, self.steps) = (self.scale * self.config.backoff, 0);
        } else if self.steps == self.config.interval {
            // A scale that is infinite in float32 would make every gradient infinite.
            let grown = self.scale * self.config.growth;
            self.scale = if grown <= f64::from(f32::MAX) { grown } else { self.scale };
            self.steps = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_grows_after_an_interval_and_falls_after_an_overflow() {
        let config = LossScaleConfig::new().with_initial(8.0).with_interval(3);
        let mut scale = LossScale::new(config);
        let mut advanced = |overflows: &[bool]| {
            overflows.iter().for_each(|overflowed| scale.advance(*overflowed));
            scale.scale
        };
        assert_eq!(advanced(&[false, false]), 8.0);
        assert_eq!(advanced(&[true]), 4.0);
        assert_eq!(advanced(&[false, false]), 4.0);
        assert_eq!(advanced(&[false]), 8.0);
        assert_eq!(advanced(&[true, true]), 2.0);
    }

    #[test]
    fn the_scale_stays_in_the_range_of_float32() {
        let config = LossScaleConfig::new().with_initial(3e38).with_interval(1);
        let mut scale = LossScale::new(config);
        scale.advance(false);
        assert_eq!(scale.scale, 3e38);
    }
}
