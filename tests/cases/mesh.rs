//! Trajectories on a mesh whose ranks have slices of all parameters.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use distmuon::comm::World;
use distmuon::distributed::{Axis, Layout, Mesh, Place};
use distmuon::{MuonConfig, Result};

use super::Outcome;

/// The axes that cut parameters, and that own the slices.
const TENSOR: &str = "tp";
const DATA: &str = "dp";

/// The axes that `DISTMUON_CONFORMANCE_MESH` lists, as in `dp=2,tp=2`. `None` if it is not set.
pub fn axes() -> Outcome<Option<Vec<Axis>>> {
    let Ok(axes) = std::env::var("DISTMUON_CONFORMANCE_MESH") else { return Ok(None) };
    let axis = |text: &str| {
        let (name, ranks) = text.split_once('=')?;
        let ranks = ranks.parse().ok()?;
        Some(if name == TENSOR { Axis::model(name, ranks) } else { Axis::data(name, ranks) })
    };
    let parsed: Option<Vec<Axis>> = axes.split(',').map(axis).collect();
    parsed.map(Some).ok_or_else(|| format!("not the axes of a mesh: {axes}"))
}

pub fn ranks(axes: &[Axis]) -> usize {
    axes.iter().map(Axis::size).product()
}

/// Slices on every rank, and slices that ranks own, if the mesh has an axis for them.
pub fn placements(axes: &[Axis]) -> Vec<fn(Layout) -> Layout> {
    let (all, owned): (fn(_) -> _, fn(Layout) -> _) =
        (|layout| layout, |layout| layout.owned(DATA).with_small_elements(1));
    let owns = axes.iter().any(|axis| axis.name() == DATA);
    if owns { vec![all, owned] } else { vec![all] }
}

/// Paths and shapes of all parameters.
#[derive(Default)]
struct Shapes {
    path: Vec<String>,
    found: Vec<(String, Vec<usize>)>,
}

impl ModuleVisitor for Shapes {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push((self.path.join("."), param.val().dims().to_vec()));
    }
}

/// The longest dimension of a shape.
fn longest(shape: &[usize]) -> usize {
    let longest = |best: usize, next: usize| if shape[next] > shape[best] { next } else { best };
    (0..shape.len()).fold(0, longest)
}

/// The layout that cuts every parameter along its longest dimension.
pub fn layout<M: Module>(
    world: &World,
    axes: &[Axis],
    model: &M,
    config: &MuonConfig,
) -> Result<Layout> {
    let mut shapes = Shapes::default();
    model.visit(&mut shapes);
    let mesh = Mesh::new(world, axes.iter().cloned())?;
    let layout = Layout::new(&mesh).with_muon(config.clone());
    Ok(shapes.found.into_iter().fold(layout, |layout, (path, shape)| {
        let pattern = format!("^{}$", path.replace('.', r"\."));
        layout.with_place(Place::shard(pattern, TENSOR, longest(&shape)))
    }))
}

/// A model whose parameters are multiplied one by one. A visitor would see the parts that a rank
/// owns.
pub trait Products: Module {
    /// The products of its slices with the gradients of the whole model.
    fn products(&self, whole: &Self, gradients: &mut Slices) -> Vec<Tensor<1>>;
}

/// The gradients of a whole model, of which a rank needs slices.
pub struct Slices {
    coordinate: usize,
    ranks: usize,
    whole: GradientsParams,
}

impl Slices {
    /// The product of a parameter's slice with that of its gradient.
    pub fn product<const D: usize>(
        &mut self,
        param: &Param<Tensor<D>>,
        whole: &Param<Tensor<D>>,
    ) -> Tensor<1> {
        let gradient = self.whole.remove::<D>(whole.id).expect("every parameter has a gradient");
        let dimension = longest(&gradient.dims());
        let extent = gradient.dims()[dimension];
        let boundary = |coordinate: usize| coordinate * extent / self.ranks;
        let (start, end) = (boundary(self.coordinate), boundary(self.coordinate + 1));
        let gradient = gradient.slice_dim(dimension, start..end);
        (param.val() * Tensor::from_inner(gradient)).sum()
    }
}

/// The gradients of a rank's slices, from the whole model and its gradients.
pub fn gradients<M: Products>(
    layout: &Layout,
    sliced: &M,
    (model, whole): (&M, GradientsParams),
) -> Result<GradientsParams> {
    let mesh = layout.mesh();
    let ranks = mesh.axes().iter().find(|axis| axis.name() == TENSOR).map_or(1, Axis::size);
    let coordinate = mesh.coordinate(TENSOR).unwrap_or(0);
    let products = sliced.products(model, &mut Slices { coordinate, ranks, whole });
    layout.backward(&Tensor::cat(products, 0).sum(), sliced)
}
