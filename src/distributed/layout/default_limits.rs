//! The bytes of two layers of a model, by which messages of passes are limited.

use std::collections::BTreeMap;

/// The share of a model's bytes that messages may take at most: two layers of eight.
const SHARE: usize = 4;

/// Returns the bytes of the largest two layers, if all were as large, but at most a quarter of all
/// bytes. One layer is then in use while the next is on its way.
///
/// A layer has the parameters of one item of the model's outermost list, as `blocks.3`. A
/// parameter outside of lists is a layer of its own only if there are no lists: an embedding would
/// otherwise stand for layers that are much smaller.
pub fn bytes_of_two_layers<'a>(parameters: impl IntoIterator<Item = (&'a str, usize)>) -> usize {
    let (mut in_lists, mut others, mut all) = (BTreeMap::<&str, usize>::new(), vec![], 0);
    for (path, bytes) in parameters {
        all += bytes;
        match layer(path) {
            Some(layer) => *in_lists.entry(layer).or_default() += bytes,
            None => others.push(bytes),
        }
    }
    let largest = in_lists.into_values().max().or(others.into_iter().max());
    (2 * largest.unwrap_or_default()).min(all / SHARE)
}

/// The item of the outermost list in which a parameter is: its path up to the first number.
fn layer(path: &str) -> Option<&str> {
    let mut end = 0;
    path.split('.').find_map(|name| {
        end += name.len();
        let item = name.bytes().all(|byte| byte.is_ascii_digit()).then(|| &path[..end]);
        end += 1;
        item
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_an_item_of_the_outermost_list() {
        assert_eq!(layer("blocks.31.experts.4.weight"), Some("blocks.31"));
        assert_eq!(layer("3.weight"), Some("3"));
        assert_eq!(layer("head2.weight"), None);
    }

    #[test]
    fn two_layers_are_at_most_a_quarter_of_the_model() {
        let model = |layers: usize, table: usize| {
            let of_layer = |layer| {
                [("q", 1), ("up", 4)].map(|(name, bytes)| (format!("h.{layer}.{name}"), bytes))
            };
            let mut all: Vec<_> = (0..layers).flat_map(of_layer).collect();
            all.push(("embedding".to_owned(), table));
            bytes_of_two_layers(all.iter().map(|(path, bytes)| (&**path, *bytes)))
        };
        assert_eq!(model(32, 100), 10);
        assert_eq!(model(4, 4), 6);
        assert_eq!(model(0, 12), 3);
        assert_eq!(bytes_of_two_layers([]), 0);
    }
}
