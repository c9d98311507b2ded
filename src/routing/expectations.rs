//! Statements about every step, each an error where it does not hold.

use std::collections::BTreeMap;

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::{ParameterRole, ParameterRoute};
use crate::error::{Error, Result};

/// A statement about every step, for [`MuonConfig::expect`](crate::MuonConfig::expect). Where it
/// does not hold, an error names the parameter, the rank and the remedy.
///
/// The routing is compared with it when the optimizer is made. Every step of a
/// [`DistModuleOptimizer`](crate::DistModuleOptimizer), as of `init_batched`, is compared as well:
/// with what ran, on every rank, without a message and without waiting for the device. Burn's
/// `ModuleOptimizer`, of `MuonConfig::init`, steps one parameter at a time and does not tell of
/// parameters without a gradient: there [`OncePerStep`](Self::OncePerStep) alone is compared.
///
/// ```
/// use burn::nn::transformer::PositionWiseFeedForwardConfig;
/// use burn::tensor::Device;
/// use distmuon::{Expectation, MuonConfig, RoutingRule};
///
/// let device = Device::default().autodiff();
/// let model = PositionWiseFeedForwardConfig::new(16, 64).init(&device);
/// let config = MuonConfig::new()
///     .with_rule(RoutingRule::muon("weight"))
///     .expect(Expectation::MuonShare(0.9))
///     .expect(Expectation::Muon(r"linear_(inner|outer)\.weight$".into()))
///     .expect(Expectation::OncePerStep);
/// let optim = config.init_batched(&model)?;
///
/// let error = config.with_rule(RoutingRule::adamw("inner")).init_batched(&model).err().unwrap();
/// assert!(error.to_string().starts_with("parameter `linear_inner.weight`"), "{error}");
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Expectation {
    /// Muon updates at least this share of the elements that are trained, above 0 and up to 1, in
    /// every step.
    MuonShare(f64),
    /// Muon updates all of every parameter whose path matches this regular expression, in every
    /// step. Leave out what some steps do not use, such as single experts.
    Muon(String),
    /// Every matrix that Muon updates is orthogonalised exactly once in every step in which it has
    /// a gradient, by its owner alone.
    OncePerStep,
}

/// The expectations of a configuration about a model.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    /// The least share of the trained elements that Muon updates.
    share: Option<f64>,
    /// The paths of parameters that Muon updates, with the pattern of each.
    by_muon: BTreeMap<String, String>,
    once: bool,
}

/// A parameter or a block in a step, as a rank knows it.
pub(crate) struct Stepped<'a> {
    /// The path, with the range of a block.
    pub path: &'a str,
    /// The path in the model.
    pub parameter: &'a str,
    pub elements: usize,
    /// `true` for matrices of Muon's.
    pub is_muon: bool,
    /// `true` if a rank had a gradient.
    pub is_present: bool,
    /// The number of its matrices that this rank owns.
    pub owned: usize,
    /// The number of its matrices that this rank has orthogonalised.
    pub iterations: usize,
}

impl Stepped<'_> {
    /// Returns `true` if Muon has updated it, as far as this rank knows.
    fn has_run(&self) -> bool {
        // A rank that owns none of its matrices can't tell; their owners can.
        self.is_muon && self.is_present && (self.owned == 0 || self.iterations > 0)
    }
}

impl Expected {
    /// Compares a routing with expectations.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for an expectation that says nothing about the model, and
    /// [`Error::Unexpected`] for one that does not hold.
    pub fn new(expectations: &[Expectation], routes: &[ParameterRoute]) -> Result<Self> {
        let mut expected = Self::default();
        for expectation in expectations {
            match expectation {
                Expectation::MuonShare(share) => {
                    ensure_share(*share, routes)?;
                    // The largest of several: where it holds, all do.
                    let share = expected.share.map_or(*share, |other| other.max(*share));
                    expected.share = Some(share);
                }
                Expectation::Muon(pattern) => {
                    let paths = of_muon(pattern, routes)?.into_iter();
                    expected.by_muon.extend(paths.map(|path| (path, pattern.clone())));
                }
                Expectation::OncePerStep => {
                    if !routes.iter().any(|route| elements_of_muon(route) > 0) {
                        let wanted = "a model with a matrix that Muon updates";
                        return Err(Error::setting("expectations", "OncePerStep", wanted));
                    }
                    expected.once = true;
                }
            }
        }
        Ok(expected)
    }

    /// Returns `true` if steps are compared.
    pub fn is_any(&self) -> bool {
        self.share.is_some() || !self.by_muon.is_empty() || self.once
    }

    /// Returns `true` if every matrix is to be orthogonalised once in a step.
    pub fn once(&self) -> bool {
        self.once
    }

    /// Compares a step of a rank.
    ///
    /// # Errors
    ///
    /// [`Error::Unexpected`].
    pub fn check(&self, step: &[Stepped<'_>], rank: usize) -> Result<()> {
        // First, since only a fault of this crate can violate it, from which the others may follow.
        for each in step.iter().filter(|_| self.once) {
            // Without a gradient on any rank, nothing is to be orthogonalised.
            let owned = if each.is_present { each.owned } else { 0 };
            ensure_once(each.path, Some(rank), owned, each.iterations)?;
        }
        for each in step.iter().filter(|each| !each.has_run()) {
            if let Some(pattern) = self.by_muon.get(each.parameter) {
                return Err(each.not_by_muon(pattern, rank));
            }
        }
        self.share.map_or(Ok(()), |share| ensure_share_of_step(share, step, rank))
    }
}

impl Stepped<'_> {
    fn not_by_muon(&self, pattern: &str, rank: usize) -> Error {
        let got = match self.is_present {
            true => "no orthogonalisation on its owner",
            false => "no gradient on any rank",
        };
        Error::Unexpected {
            parameter: self.path.to_owned(),
            rank: Some(rank),
            expected: format!("Muon in every step (`{pattern}`)"),
            got: got.to_owned(),
            remedy: "use the parameter in the loss of every step, or leave it out of the pattern",
        }
    }
}

/// Fails unless a rank has orthogonalised every matrix that it owns once, and no other.
pub(crate) fn ensure_once(
    parameter: &str,
    rank: Option<usize>,
    owned: usize,
    iterations: usize,
) -> Result<()> {
    if owned == iterations {
        return Ok(());
    }
    Err(Error::Unexpected {
        parameter: parameter.to_owned(),
        rank,
        expected: format!("{owned} orthogonalisations in this step, one of each matrix owned"),
        got: iterations.to_string(),
        remedy: "load the last checkpoint, and report the configuration: no setting may cause this",
    })
}

/// The elements of a trained parameter.
fn elements(route: &ParameterRoute) -> usize {
    match route.role {
        ParameterRole::Frozen => 0,
        _ => route.shape.iter().product(),
    }
}

/// The elements of a parameter that Muon updates.
fn elements_of_muon(route: &ParameterRoute) -> usize {
    let blocks = match route.role {
        ParameterRole::Muon { .. } => route.matrix_blocks().expect("a route has matrices"),
        _ => return 0,
    };
    let of_muon = blocks.batches().enumerate().filter(|(index, _)| !route.left.contains(index));
    of_muon.map(|(_, batch)| batch.iter().product::<usize>()).sum()
}

/// Fails if Muon updates less than a share of the trained elements.
fn ensure_share(share: f64, routes: &[ParameterRoute]) -> Result<()> {
    let setting = || format!("MuonShare({share})");
    if !(share > 0.0 && share <= 1.0) {
        return Err(Error::setting("expectations", setting(), "a share above 0 and up to 1"));
    }
    let all: usize = routes.iter().map(elements).sum();
    let of_muon: usize = routes.iter().map(elements_of_muon).sum();
    let actual = of_muon as f64 / all as f64;
    if actual >= share {
        return Ok(());
    }
    let rest = |route: &&ParameterRoute| elements(route) - elements_of_muon(route);
    // The parameter with which the share would rise most.
    let largest = routes.iter().max_by_key(rest).expect("a model has parameters");
    Err(Error::Unexpected {
        parameter: largest.path.clone(),
        rank: None,
        expected: format!("Muon for at least {} of what is trained", percent(share)),
        got: format!(
            "{}, and `{}` for this parameter, the largest of the others ({})",
            percent(actual),
            largest.optimizer,
            largest.reason
        ),
        remedy: "route further matrices by `RoutingRule::muon`, or lower the share",
    })
}

/// Fails if Muon has updated less than a share of the trained elements in a step.
fn ensure_share_of_step(share: f64, step: &[Stepped<'_>], rank: usize) -> Result<()> {
    let all: usize = step.iter().map(|each| each.elements).sum();
    let (run, rest): (Vec<_>, Vec<_>) = step.iter().partition(|each| each.has_run());
    let actual = run.iter().map(|each| each.elements).sum::<usize>() as f64 / all as f64;
    if actual >= share {
        return Ok(());
    }
    // The routing is compared before, so that a matrix has not been updated.
    let missing = rest.iter().filter(|each| each.is_muon).max_by_key(|each| each.elements);
    let missing = missing.expect("a matrix was not updated");
    Err(Error::Unexpected {
        parameter: missing.path.to_owned(),
        rank: Some(rank),
        expected: format!("Muon for at least {} of what is trained, in every step", percent(share)),
        got: format!("{}, without this parameter, the largest that is missing", percent(actual)),
        remedy: "use all parameters in the loss, and pass the gradients of this model",
    })
}

/// The paths that match a pattern, all of Muon's.
fn of_muon(pattern: &str, routes: &[ParameterRoute]) -> Result<Vec<String>> {
    let setting = |problem: &str| format!("Muon(\"{pattern}\"){problem}");
    let regex = Regex::new(pattern).map_err(|error| {
        Error::setting("expectations", setting(&format!(": {error}")), "a regular expression")
    })?;
    let matches: Vec<_> = routes.iter().filter(|route| regex.is_match(&route.path)).collect();
    if matches.is_empty() {
        return Err(Error::setting(
            "expectations",
            setting(", which matches none"),
            "a pattern that matches the path of a parameter (print `MuonConfig::route` without it)",
        ));
    }
    if let Some(other) = matches.iter().find(|route| elements_of_muon(route) < size(route)) {
        return Err(Error::Unexpected {
            parameter: other.path.clone(),
            rank: None,
            expected: format!("Muon (`{pattern}`)"),
            got: match other.role {
                ParameterRole::Frozen => "no optimizer, since it is frozen".to_owned(),
                _ => format!("`{}` ({})", other.optimizer, other.reason),
            },
            remedy: "route it by `RoutingRule::muon`, or leave it out of the pattern",
        });
    }
    Ok(matches.into_iter().map(|route| route.path.clone()).collect())
}

/// The elements of a parameter, trained or not.
fn size(route: &ParameterRoute) -> usize {
    route.shape.iter().product()
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}
