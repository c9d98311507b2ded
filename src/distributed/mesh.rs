//! The ranks of a world on named axes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::comm::{Communicator, Difference, World};
use crate::error::{Error, Result};

/// The name of the only axis of [`Mesh::flat`].
const FLAT: &str = "dp";

/// An axis of a [`Mesh`]: a name and a number of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Axis {
    name: String,
    size: usize,
    is_model: bool,
}

impl Axis {
    /// Returns an axis whose ranks train on different data.
    pub fn data(name: impl Into<String>, size: usize) -> Self {
        Self { name: name.into(), size, is_model: false }
    }

    /// Returns an axis whose ranks train on the same data, each with other slices of some
    /// parameters: tensor parallelism.
    pub fn model(name: impl Into<String>, size: usize) -> Self {
        Self { name: name.into(), size, is_model: true }
    }

    /// Returns `true` if its ranks train on the same data.
    pub fn is_model(&self) -> bool {
        self.is_model
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }
}

/// One rank's view of a world whose ranks lie on named axes, the last one with the fastest links.
///
/// The ranks are numbered row by row: on `[Axis::data("node", 2), Axis::data("gpu", 4)]`, ranks 0
/// to 3 are node 0. The order of the axes is the order of their links: axes of
/// [`Axis::model`](Axis::model) come last. Clones are the same rank of the same mesh.
///
/// ```
/// use burn::tensor::Device;
/// use distmuon::World;
/// use distmuon::distributed::{Axis, Mesh};
///
/// let devices = vec![Device::default(); 4];
/// World::threads(devices, |world| {
///     let mesh = Mesh::new(&world, [Axis::data("node", 2), Axis::data("gpu", 2)])?;
///     assert_eq!(mesh.coordinate("node"), Some(world.rank() / 2));
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    world: World,
    data: World,
    axes: Arc<[Axis]>,
    /// For every axis, the ranks along it that have this rank's other coordinates.
    groups: Arc<[Communicator]>,
    known: Arc<Mutex<KnownGroupings>>,
}

/// Groups and grids of the ranks that were made so far.
#[derive(Debug)]
struct KnownGroupings {
    /// The groups that a rank is in, by the ranks of all groups of which one rank is in exactly
    /// one. Engines keep connections and memory for each: groups of the same ranks are one.
    groups: Vec<(Vec<Vec<usize>>, Communicator)>,
    /// By the axes of slices. Each has all ranks, and many parameters have the same one.
    grids: BTreeMap<Vec<String>, Arc<Grid>>,
}

impl KnownGroupings {
    fn of(world: &World) -> Arc<Mutex<Self>> {
        // The world itself is the group of all ranks: no engine has to make it again.
        let all = vec![(0..world.size()).collect()];
        let groups = vec![(all, world.communicator())];
        Arc::new(Mutex::new(Self { groups, grids: BTreeMap::new() }))
    }
}

impl Mesh {
    /// Returns this rank's view of a world with these axes. All ranks make this call, with the same
    /// axes: the ranks are split into groups here, and never again.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a size of zero, a name that occurs twice, and sizes whose product is
    /// not the number of ranks; [`Error::SettingsDiffer`] if the ranks give different axes; those
    /// of every collective.
    pub fn new(world: &World, axes: impl IntoIterator<Item = Axis>) -> Result<Self> {
        let axes: Vec<Axis> = axes.into_iter().collect();
        let described = describe(&axes);
        // Before the check of sizes: ranks with other meshes get an error that names them.
        world.same_settings(&described, |first, other| {
            let [first, other] = [first, other].map(String::clone);
            (first != other).then(|| Difference { setting: "mesh".to_owned(), first, other })
        })?;
        check(&axes, world.size())?;
        // Ranks that differ only on model axes get the same data: their coordinates there are the
        // color, so each data world has one of them.
        let models: Vec<usize> = (0..axes.len()).filter(|axis| axes[*axis].is_model).collect();
        let all = Self::flat(world);
        let groups = (0..axes.len())
            .map(|axis| all.split(|rank| [position(&axes, axis, rank).1, rank]))
            .collect::<Result<_>>()?;
        let data = all.split(|rank| [index(&axes, models.iter().copied(), rank), rank])?;
        let data = World::new(data, world.device().clone());
        Ok(Self { data, axes: axes.into(), groups, ..all })
    }

    /// Returns a mesh with a single axis, `dp`, which sends nothing.
    pub fn flat(world: &World) -> Self {
        let axes = [Axis::data(FLAT, world.size())];
        let groups = [world.communicator()].into();
        let known = KnownGroupings::of(world);
        Self { world: world.clone(), data: world.clone(), axes: axes.into(), groups, known }
    }

    /// Returns this rank's group of those with the same color, in the order of a key, where
    /// `color_and_key` has both of any rank. Groups of the same ranks are made once. All ranks make
    /// this call, with the same colors.
    ///
    /// # Errors
    ///
    /// As every collective.
    pub(super) fn split(
        &self,
        color_and_key: impl Fn(usize) -> [usize; 2],
    ) -> Result<Communicator> {
        let mut by_color: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for rank in 0..self.world.size() {
            let [color, key] = color_and_key(rank);
            by_color.entry(color).or_default().push((key, rank));
        }
        let ranks = by_color.into_values().map(|mut group| {
            group.sort_unstable();
            group.into_iter().map(|(_, rank)| rank).collect()
        });
        let mut groups: Vec<Vec<usize>> = ranks.collect();
        // The same groups may come from other colors. Sorted, they are found again.
        groups.sort_unstable();
        if let Some((_, group)) = self.known().groups.iter().find(|(known, _)| *known == groups) {
            return Ok(group.clone());
        }
        // All ranks have the same list, so all of them come to this call, or none.
        let [color, key] = color_and_key(self.world.rank());
        let group = self.world.comm().split(color, key)?;
        self.known().groups.push((groups, group.clone()));
        Ok(group)
    }

    fn known(&self) -> MutexGuard<'_, KnownGroupings> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the world of all ranks.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Returns the ranks among which training items are divided, by
    /// [`World::part`](crate::comm::World::part): all ranks, or those with this rank's coordinates
    /// on the axes of [`Axis::model`].
    pub fn data(&self) -> &World {
        &self.data
    }

    /// Returns the axes.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// Returns this rank's coordinate on an axis. `None` if the mesh does not have the axis.
    pub fn coordinate(&self, axis: &str) -> Option<usize> {
        Some(position(&self.axes, self.index(axis)?, self.world.rank()).0)
    }

    /// The coordinate of a rank on an axis, and its number among the ranks with that coordinate.
    ///
    /// # Panics
    ///
    /// If the mesh does not have the axis.
    pub(super) fn position(&self, axis: &str, rank: usize) -> (usize, usize) {
        position(&self.axes, self.index(axis).expect("an axis of the mesh"), rank)
    }

    /// All ranks in two dimensions, the second of which has the coordinates on some axes, the first
    /// of them the outermost. Without axes, every rank is a row.
    ///
    /// # Panics
    ///
    /// If the mesh does not have an axis.
    pub(super) fn grid(&self, axes: &[String]) -> Arc<Grid> {
        let mut known = self.known();
        let grid =
            known.grids.entry(axes.to_vec()).or_insert_with(|| Arc::new(self.new_grid(axes)));
        grid.clone()
    }

    fn new_grid(&self, axes: &[String]) -> Grid {
        let cut: Vec<usize> =
            axes.iter().map(|axis| self.index(axis).expect("an axis of the mesh")).collect();
        let others: Vec<usize> = (0..self.axes.len()).filter(|axis| !cut.contains(axis)).collect();
        let count = |axes: &[usize]| axes.iter().map(|axis| self.axes[*axis].size).product();
        let mut ranks = vec![vec![0; count(&cut)]; count(&others)];
        let positions: Vec<_> = (0..self.world.size())
            .map(|rank| {
                let at = |axes: &[usize]| index(&self.axes, axes.iter().copied(), rank);
                [at(&others), at(&cut)]
            })
            .collect();
        for (rank, [replica, slice]) in positions.iter().enumerate() {
            ranks[*replica][*slice] = rank;
        }
        let [replica, slice] = positions[self.world.rank()];
        Grid { ranks, positions, replica, slice }
    }

    /// Returns the axis of a name. `None` if the mesh does not have it.
    pub(super) fn axis(&self, name: &str) -> Option<&Axis> {
        Some(&self.axes[self.index(name)?])
    }

    /// Returns the ranks along an axis that have this rank's other coordinates. `None` if the mesh
    /// does not have the axis.
    pub fn group(&self, axis: &str) -> Option<&Communicator> {
        Some(&self.groups[self.index(axis)?])
    }

    fn index(&self, axis: &str) -> Option<usize> {
        self.axes.iter().position(|known| known.name == axis)
    }

    /// The names of all axes, for error messages.
    pub(super) fn names(&self) -> String {
        let names = self.axes.iter().map(|axis| format!("`{}`", axis.name));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// All ranks by the slices of parameters that they have.
#[derive(Debug, Clone)]
pub struct Grid {
    /// `ranks[replica][slice]`: the ranks of a column have the same slice.
    pub ranks: Vec<Vec<usize>>,
    /// The positions of all ranks, `[replica, slice]`.
    pub positions: Vec<[usize; 2]>,
    /// The position of this rank.
    pub replica: usize,
    pub slice: usize,
}

/// The index of a rank's coordinates on some axes, the last of which varies the fastest.
fn index(axes: &[Axis], on: impl Iterator<Item = usize>, rank: usize) -> usize {
    on.fold(0, |index, axis| index * axes[axis].size + position(axes, axis, rank).0)
}

/// The coordinate of a rank on an axis, and its number among the ranks with that coordinate, which
/// the ranks that differ in this coordinate only have in common.
fn position(axes: &[Axis], axis: usize, rank: usize) -> (usize, usize) {
    // Ranks are numbered row by row: the axes behind this one vary faster.
    let stride: usize = axes[axis + 1..].iter().map(Axis::size).product();
    let size = axes[axis].size;
    (rank / stride % size, rank / (stride * size) * stride + rank % stride)
}

fn describe(axes: &[Axis]) -> String {
    let axes = axes.iter().map(|Axis { name, size, is_model }| match is_model {
        true => format!("{name}={size} (model)"),
        false => format!("{name}={size}"),
    });
    axes.collect::<Vec<_>>().join(",")
}

fn check(axes: &[Axis], ranks: usize) -> Result<()> {
    let invalid = |expected| Err(Error::setting("mesh", describe(axes), expected));
    if axes.iter().any(|axis| axis.size == 0) {
        return invalid("axes with at least one rank");
    }
    let occurs_before =
        |index: usize| axes[..index].iter().any(|axis| axis.name == axes[index].name);
    if (0..axes.len()).any(occurs_before) {
        return invalid("axes with different names");
    }
    match axes.iter().map(Axis::size).product::<usize>() == ranks {
        true => Ok(()),
        false => Err(Error::setting(
            "mesh",
            format!("{} for {ranks} ranks", describe(axes)),
            "axes whose sizes multiply to the number of ranks",
        )),
    }
}
