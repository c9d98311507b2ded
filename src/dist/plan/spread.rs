//! Which ranks follow each other when matrices are dealt out to several nodes.

/// All ranks in an order in which neighbours sit at different places of different nodes. Nodes have
/// equally many ranks.
///
/// Between nodes, the ranks at one place of all nodes are a group, and a node has one link. Dealt in the
/// order of ranks, the matrices of a small bucket, or of one layer, would all belong to the first node,
/// and its link would carry all of it. Here, place and node advance together, along a diagonal of the
/// grid that they are, and the next diagonal begins where one ends: neighbouring matrices use different
/// groups and different links. That is what DMuon (<https://arxiv.org/abs/2606.27153>) gets from the
/// exclusive or of both numbers, where these are powers of two.
pub fn spread(nodes: &[Vec<usize>]) -> Vec<usize> {
    let (count, places) = (nodes.len(), nodes[0].len());
    let mut multiples = (1..).map(|k| k * places);
    let diagonal = multiples.find(|multiple| multiple % count == 0).expect("count times places");
    (0..count * places).map(|i| nodes[(i + i / diagonal) % count][i % places]).collect()
}
