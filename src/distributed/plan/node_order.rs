//! The order in which the ranks of several nodes are assigned matrices.

/// Returns all ranks in an order in which neighbours differ in both node and local rank. Nodes have
/// equal numbers of ranks.
///
/// Between nodes, the ranks with one local rank form a group, and a node has one link. In the order
/// of ranks, all matrices of a small bucket, or of one layer, would belong to the first node, and
/// its link would carry all of their traffic. Here, local rank and node advance together along a
/// diagonal of their grid, and the next diagonal begins where one ends: neighbouring matrices use
/// different groups and different links. DMuon (<https://arxiv.org/abs/2606.27153>) gets the same
/// from the exclusive or of both numbers, where these are powers of two.
pub fn node_order(nodes: &[Vec<usize>]) -> Vec<usize> {
    let count = nodes.len();
    let local_ranks = nodes[0].len();
    // The least common multiple: after that number of ranks, a diagonal is back at its first rank.
    let mut multiples = (1..).map(|k| k * local_ranks);
    let diagonal = multiples
        .find(|multiple| multiple % count == 0)
        .expect("the product of both numbers is a common multiple");
    (0..count * local_ranks).map(|i| nodes[(i + i / diagonal) % count][i % local_ranks]).collect()
}
