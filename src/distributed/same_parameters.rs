//! The agreement of the ranks on the parameters of a model.

use super::plan::Parameter;
use crate::comm::World;
use crate::error::{Error, Result};

/// Fails if the parameters of the ranks are not the same, and names the first that is not.
pub fn same_parameters(world: &World, parameters: &[Parameter]) -> Result<()> {
    match world.compare(&parameters.to_vec(), |first, local| first_difference(first, local))? {
        Some((rank, (parameter, first, other))) => {
            Err(Error::ModelsDiffer { rank, parameter, other, first })
        }
        None => Ok(()),
    }
}

/// The first entries at one index that two lists do not have in common. One may be missing.
pub fn first_unequal<'a, T: PartialEq>(
    first: &'a [T],
    local: &'a [T],
) -> Option<(Option<&'a T>, Option<&'a T>)> {
    let entries =
        (0..first.len().max(local.len())).map(|index| (first.get(index), local.get(index)));
    entries.into_iter().find(|(first, local)| first != local)
}

/// The first parameter that two models do not have in common: its path, and what it is in both.
fn first_difference(first: &[Parameter], local: &[Parameter]) -> Option<(String, String, String)> {
    let described = |parameter: Option<&Parameter>| match parameter {
        Some(found) => format!("{:?} {} ({:?})", found.shape, found.dtype.name(), found.work),
        None => "absent".to_owned(),
    };
    let (first, local) = first_unequal(first, local)?;
    // Both names, if they differ: one of them is the misplaced parameter.
    let named = |found: Option<&Parameter>| found.map(|found| found.path.clone());
    let parameter = match (named(first), named(local)) {
        (Some(first), Some(local)) if first != local => format!("{first}` / `{local}"),
        (first, local) => first.or(local).expect("different entries are not both missing"),
    };
    Some((parameter, described(first), described(local)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_which_one_is_longer_differ() {
        assert_eq!(first_unequal(&[1, 2], &[1, 2]), None);
        assert_eq!(first_unequal(&[1, 2], &[1]), Some((Some(&2), None)));
        assert_eq!(first_unequal(&[1], &[1, 3]), Some((None, Some(&3))));
    }
}
