//! The order of the uses in a pass, predicted by the pass before.

use std::collections::BTreeMap;

/// The parameters that are used in a pass, in order.
#[derive(Debug, Default)]
pub struct UseOrder {
    before: Vec<usize>,
    now: Vec<usize>,
    /// `true` if this pass has differed from the one before.
    differs: bool,
}

impl UseOrder {
    /// Adds a use. Returns the uses that come next if this pass goes on as the one before.
    pub fn next(&mut self, index: usize) -> &[usize] {
        let is_complete = !self.differs && self.now.len() == self.before.len();
        if is_complete && self.before.first() == Some(&index) {
            // The last pass was abandoned after its forward pass.
            self.now.clear();
        }
        let position = self.now.len();
        // Once another use has come, the rest of the pass is not predicted: what is gathered for
        // nothing costs a message and memory.
        self.differs |= self.before.get(position) != Some(&index);
        self.now.push(index);
        if self.differs { &[] } else { &self.before[position + 1..] }
    }

    /// Ends a pass.
    pub fn end(&mut self) {
        // An end without uses, as after an evaluation, does not forget the last training pass.
        if !self.now.is_empty() {
            self.before = std::mem::take(&mut self.now);
        }
        self.differs = false;
    }
}

/// The parameter that was used after each, where no call ends a pass: in evaluation. Its memory
/// does not grow with the passes.
#[derive(Debug, Default)]
pub struct Successors {
    first: Option<usize>,
    last: Option<usize>,
    after: BTreeMap<usize, usize>,
    /// `true` once a pass has begun again: before, what follows a shared parameter is not known.
    is_repeated: bool,
}

impl Successors {
    /// Adds a use. Returns the uses that come next if each parameter follows the same as before, up
    /// to the first of the passes: another pass may never come.
    pub fn next(&mut self, index: usize) -> Vec<usize> {
        // A parameter that is used twice in a row is there already.
        if let Some(last) = self.last.replace(index).filter(|last| *last != index) {
            self.after.insert(last, index);
            self.is_repeated |= self.first == Some(index);
        }
        let first = *self.first.get_or_insert(index);
        if !self.is_repeated {
            return vec![];
        }
        let mut next = vec![];
        let mut following = self.after.get(&index);
        // At most one of each edge: a circle without `first` repeats, and a parameter that is on
        // its way already is not gathered again.
        let most = self.after.len();
        while let Some(index) = following.filter(|index| **index != first && next.len() < most) {
            next.push(*index);
            following = self.after.get(index);
        }
        next
    }

    /// Ends all passes: the next use is the first of another.
    pub fn end(&mut self) {
        // `after` stays: the next evaluation most likely goes the same way.
        (self.first, self.last) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_is_predicted_by_what_followed_each_parameter() {
        let mut order = Successors::default();
        let mut pass = |uses: &[usize]| -> Vec<Vec<usize>> {
            uses.iter().map(|index| order.next(*index)).collect()
        };
        assert_eq!(pass(&[3, 1, 2]), [const { Vec::<usize>::new() }; 3]);
        assert_eq!(pass(&[3, 1, 2]), [vec![1, 2], vec![2], vec![]]);
        // Another way is followed from its second time on.
        assert_eq!(pass(&[3, 4, 2]), [vec![1, 2], vec![], vec![]]);
        assert_eq!(pass(&[3, 4, 2]), [vec![4, 2], vec![2], vec![]]);
        // A parameter that is used twice, and the first one again at the end, which can't be told
        // from the begin of another pass.
        _ = pass(&[3, 1, 1, 2, 3]);
        assert_eq!(pass(&[3, 1, 1, 2, 3])[1..], [vec![2], vec![2], vec![], vec![1, 2]]);
        // After the end of a pass, the next use is the first of another.
        order.end();
        assert_eq!(order.next(1), [2, 3]);
    }

    #[test]
    fn the_first_evaluation_predicts_nothing_after_a_shared_parameter() {
        let mut order = Successors::default();
        assert!([3, 1, 2, 1, 4].iter().all(|index| order.next(*index).is_empty()));
        // Of two that follow a shared parameter, the last one counts.
        assert_eq!(order.next(3), [1, 4]);
    }

    #[test]
    fn a_pass_is_predicted_by_the_one_before() {
        let mut order = UseOrder::default();
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
