//! The division of the model among ranks.

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use distmuon::MuonConfig;
use distmuon::comm::World;
use distmuon::distributed::{self, Axis, Layout, Mesh, Publish};

use super::options::at_least_one;

/// The options that place parameters on ranks. The results are the same with all of them.
#[derive(Args, Debug, Clone, Default)]
pub struct Sharding {
    /// Axes of the ranks, the fastest links last. Default: dp, of all ranks.
    ///
    /// As in node=2,gpu=4. The sizes multiply to the number of ranks.
    #[arg(long, value_delimiter = ',', value_name = "AXIS=RANKS,..", value_parser = axis)]
    #[arg(help_heading = "Ranks")]
    pub mesh: Vec<Axis>,
    /// Divides the parameters among the ranks along an axis of --mesh.
    ///
    /// A rank has the part that it updates. For dist-muon and dist-adamw.
    #[arg(long, value_name = "AXIS", help_heading = "Ranks")]
    pub owned: Option<String>,
    /// Weights that --owned keeps until the backward pass.
    #[arg(long, value_enum, default_value_t = Keep::Nothing, help_heading = "Ranks")]
    pub keep: Keep,
    /// Sends gradients and parameters during the passes.
    ///
    /// For dist-muon and dist-adamw.
    #[arg(long, help_heading = "Ranks")]
    pub overlap: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq)]
pub enum Keep {
    /// None: they are gathered again.
    #[default]
    Nothing,
    /// All.
    Weights,
}

impl Sharding {
    /// Returns `true` if it needs an optimizer that sees the whole model.
    pub fn is_shared(&self) -> bool {
        self.owned.is_some() || self.overlap
    }

    /// The time at which parameters are waited for.
    pub fn publish(&self) -> Publish {
        if self.overlap { Publish::AtFirstUse } else { Publish::Now }
    }

    /// The device of a rank, which computes activations again if weights are gathered again.
    pub fn device(&self, device: Device) -> Device {
        match (&self.owned, self.keep) {
            (Some(_), Keep::Nothing) => device.gradient_checkpointing(),
            _ => device,
        }
    }

    /// The layout for an optimizer with these settings. All ranks make this call.
    pub fn layout(&self, world: &World, muon: &MuonConfig) -> Result<Layout> {
        let mesh = match &self.mesh[..] {
            [] => Mesh::flat(world),
            axes => Mesh::new(world, axes.iter().cloned())?,
        };
        let layout = Layout::new(&mesh).with_muon(muon.clone()).with_keep(match self.keep {
            Keep::Nothing => distributed::Keep::Nothing,
            Keep::Weights => distributed::Keep::Weights,
        });
        let layout = if self.overlap { layout.overlap_backward() } else { layout };
        Ok(match &self.owned {
            Some(axis) => layout.owned(axis),
            None => layout,
        })
    }
}

/// Parses an axis.
fn axis(text: &str) -> Result<Axis> {
    let (name, ranks) = text.split_once('=').context("it must be AXIS=RANKS, as in gpu=2")?;
    ensure!(!name.is_empty(), "it must be AXIS=RANKS, as in gpu=2");
    Ok(Axis::data(name, at_least_one(ranks).context("RANKS")?))
}
