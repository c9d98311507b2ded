//! The order of the uses in a pass, predicted by the pass before.

/// The parameters that are used in a pass, in order.
#[derive(Debug, Default)]
pub struct Order {
    before: Vec<usize>,
    now: Vec<usize>,
    /// `true` if this pass has differed from the one before.
    differs: bool,
}

impl Order {
    /// Adds a use. Returns the uses that come next if this pass goes on as the one before.
    pub fn next(&mut self, index: usize) -> &[usize] {
        let is_complete = !self.differs && self.now.len() == self.before.len();
        if is_complete && self.before.first() == Some(&index) {
            // The last pass was abandoned after its forward pass.
            self.now.clear();
        }
        let position = self.now.len();
        self.differs |= self.before.get(position) != Some(&index);
        self.now.push(index);
        if self.differs { &[] } else { &self.before[position + 1..] }
    }

    /// Ends a pass.
    pub fn end(&mut self) {
        if !self.now.is_empty() {
            self.before = std::mem::take(&mut self.now);
        }
        self.differs = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_predicted_by_the_one_before() {
        let mut order = Order::default();
        for index in [3, 1, 2] {
            assert!(order.next(index).is_empty());
        }
        order.end();
        assert_eq!(order.next(3), [1, 2]);
        assert_eq!(order.next(1), [2]);
        assert!(order.next(2).is_empty());
        // Abandoned: the next use belongs to a new pass.
        assert_eq!(order.next(3), [1, 2]);
        // Another way: nothing is predicted until the end.
        assert!(order.next(2).is_empty() && order.next(1).is_empty());
        order.end();
        assert_eq!(order.next(3), [2, 1]);
    }
}
