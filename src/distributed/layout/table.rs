//! The places of all parameters, as a table.

use std::fmt;
use std::sync::Arc;

use comfy_table::{Table, presets};

use super::pass_parameter::PassParameter;
use crate::distributed::plan::Counts;
use crate::distributed::sliced_parameters::Cuts;
use crate::parameters::Found;

/// The place of every parameter, from [`Layout::table`](super::Layout::table). Prints as a table.
///
/// ```
/// use burn::nn::LinearConfig;
/// use distmuon::World;
/// use distmuon::distributed::{Layout, LayoutTable};
///
/// World::launch(2, |world| {
///     let model = LinearConfig::new(64, 64).init(world.device());
///     let table: LayoutTable = Layout::from(&world).owned("dp").table(&model)?;
///     println!("{table}");
///     let parts = table.parts("weight").expect("the ranks divide it");
///     assert_eq!(parts.iter().sum::<usize>(), 64 * 64);
///     assert_eq!(table.parts("bias"), None); // it is small: both ranks have it
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LayoutTable {
    rows: Vec<LayoutRow>,
}

/// The place of a parameter in a [`LayoutTable`].
#[derive(Debug, Clone)]
struct LayoutRow {
    path: String,
    shape: Vec<usize>,
    /// The shape of this rank's slice, and the axes along which it is cut, if it is.
    cut: Option<(Vec<usize>, Vec<String>)>,
    /// Elements of every part, if it is divided.
    counts: Option<Counts>,
    /// `true` if the parts are rows.
    in_rows: bool,
}

impl LayoutTable {
    pub(super) fn new(found: &[Found], passing: &[Arc<PassParameter>], cuts: &Cuts) -> Self {
        // Both lists are in the order of the model.
        let mut passing = passing.iter();
        let row = |found: &Found| {
            let pass_parameter = found
                .placement
                .reduces_in_backward()
                .then(|| passing.next().expect("the passes have every owned parameter"));
            let owned = pass_parameter.filter(|pass_parameter| pass_parameter.placement.is_owned());
            let counts = owned.map(|pass_parameter| pass_parameter.part_counts().clone());
            let slice = cuts.slice(&found.path);
            let (path, shape) = (found.path.clone(), found.shape.clone());
            let cut = slice.map(|slice| (slice.shape(), slice.slices.axes().to_vec()));
            let in_rows = cuts.is_in_rows(&path);
            LayoutRow { path, shape, cut, counts, in_rows }
        };
        Self { rows: found.iter().map(row).collect() }
    }

    /// Returns the elements of every part of a parameter, in the order of the axis along which it
    /// is divided. `None` if every rank has all of it, or the model does not have the parameter.
    pub fn parts(&self, path: &str) -> Option<Vec<usize>> {
        let row = self.rows.iter().find(|row| row.path == path)?;
        row.counts.as_ref().map(Counts::to_vec)
    }
}

impl LayoutRow {
    /// The slice, and the coordinates on the axis that have it.
    fn place(&self) -> String {
        match &self.cut {
            None => self.owner(),
            Some((shape, axes)) => {
                format!("{shape:?} of it along {}, {}", axes.join(", "), self.owner())
            }
        }
    }

    /// The coordinates on the axis that have it.
    fn owner(&self) -> String {
        let Some(counts) = &self.counts else { return "replicated".to_owned() };
        let filled = counts.iter().enumerate().filter(|(_, count)| *count > 0);
        let ranks: Vec<String> = filled.map(|(rank, _)| rank.to_string()).collect();
        let parts = if self.in_rows { "in rows" } else { "in parts" };
        match &ranks[..] {
            [rank] => format!("whole at {rank}"),
            ranks if ranks.len() == counts.ranks() => format!("{parts} at all"),
            ranks => format!("{parts} at {}", ranks.join(", ")),
        }
    }
}

impl fmt::Display for LayoutTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(["parameter", "shape", "place"]);
        for row in &self.rows {
            table.add_row([row.path.clone(), format!("{:?}", row.shape), row.place()]);
        }
        write!(f, "{table}")
    }
}
