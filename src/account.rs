//! The account of a step: what has updated every parameter, where, how often and how.

use std::collections::BTreeSet;
use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use crate::matrix_blocks::Blocks;
use crate::routing::{ParameterRole, ParameterRoute, Routing};
use crate::update::{Entries, ONLY_RANK};
pub use crate::update::{IterationUsed, UpdatedBy};

/// The account of a step, from
/// [`DistModuleOptimizer::account`](crate::DistModuleOptimizer::account) or [`Routing::account`].
/// Prints as a table with a line for every group, and as `{:#}` with a line for every parameter.
///
/// The updates write it where they run: it does not repeat the routing or the plan.
///
/// ```
/// use distmuon::account::{Account, GroupAccount, IterationUsed, ParameterAccount, UpdatedBy};
///
/// fn log(account: &Account) {
///     for GroupAccount { updated_by, share, .. } in account.groups() {
///         println!("{updated_by}: {:.1} % of the elements", 100.0 * share);
///     }
///     for ParameterAccount { path, updated_by, iteration, .. } in &account.parameters {
///         if *updated_by == UpdatedBy::NoGradient {
///             println!("{path}: no gradient");
///         }
///         if let Some(IterationUsed { form, dtype, .. }) = iteration {
///             println!("{path}: {form:?}, {dtype:?}");
///         }
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Account {
    /// Every parameter, in the order of the model. A matrix that is cut into blocks has an entry
    /// for each.
    pub parameters: Vec<ParameterAccount>,
}

/// The account of a parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ParameterAccount {
    /// The path of the parameter, with the range of a block.
    pub path: String,
    /// The number of elements.
    pub elements: usize,
    /// The optimizer that has updated it. A gradient with NaN or infinity, which leaves the
    /// parameter as it is, counts as updated: the device decides that.
    pub updated_by: UpdatedBy,
    /// The ranks that have updated it: the owners of its matrices, or the ranks that update its
    /// elements.
    pub ranks: Vec<usize>,
    /// The number of matrices that Muon is to update.
    pub matrices: usize,
    /// The number of matrices that were orthogonalised on all ranks, each counted every time: after
    /// one step the number of `matrices`.
    pub iterations: usize,
    /// The way in which they were orthogonalised.
    pub iteration: Option<IterationUsed>,
    /// The norm of the change, after [`Account::with_norms`].
    pub update_norm: Option<f64>,
}

/// The account of all parameters that one optimizer has updated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupAccount {
    /// The optimizer.
    pub updated_by: UpdatedBy,
    /// The number of parameters and blocks.
    pub tensors: usize,
    /// The number of elements.
    pub elements: usize,
    /// The elements, relative to all that are trained; 0 for frozen parameters.
    pub share: f64,
    /// The ranks that have updated any of them.
    pub ranks: BTreeSet<usize>,
    /// The number of matrices that Muon is to update.
    pub matrices: usize,
    /// The number of matrices that were orthogonalised.
    pub iterations: usize,
    /// The ways in which they were orthogonalised, as [`IterationUsed`] prints.
    pub used: BTreeSet<String>,
    /// The norm of the change of all parameters, after [`Account::with_norms`].
    pub update_norm: Option<f64>,
}

impl Account {
    /// The account of what the ranks have done.
    pub(crate) fn new(routing: &Routing, by_rank: &[(usize, Entries)]) -> Self {
        let of_route = |route: &ParameterRoute| {
            // A route has matrices, or none that could be cut.
            let blocks = route.matrix_blocks().expect("a route has matrices");
            let names = blocks.names(&route.path).into_iter().zip(matrices(route, &blocks));
            names
                .map(|(path, (matrices, elements))| {
                    ParameterAccount::new(path, (matrices, elements), route.role, by_rank)
                })
                .collect::<Vec<_>>()
        };
        Self { parameters: routing.routes().iter().flat_map(of_route).collect() }
    }

    /// Returns the accounts by optimizer, in the order of the first parameter of each.
    pub fn groups(&self) -> Vec<GroupAccount> {
        let trained = self.trained_elements();
        let mut groups: Vec<GroupAccount> = vec![];
        for parameter in &self.parameters {
            let known = groups.iter().position(|group| group.updated_by == parameter.updated_by);
            let index = known.unwrap_or_else(|| {
                groups.push(GroupAccount::empty(parameter.updated_by.clone()));
                groups.len() - 1
            });
            groups[index].add(parameter, trained);
        }
        groups
    }

    /// Returns the elements that Muon has updated, relative to all that are trained.
    pub fn muon_share(&self) -> f64 {
        let muon = self.groups().into_iter().find(|group| group.updated_by == UpdatedBy::Muon);
        muon.map_or(0.0, |group| group.share)
    }

    fn trained_elements(&self) -> usize {
        let trained = self.parameters.iter().filter(|each| each.updated_by != UpdatedBy::Frozen);
        trained.map(|each| each.elements).sum()
    }
}

/// The matrices of Muon's in every block of a parameter, and its elements.
fn matrices(route: &ParameterRoute, blocks: &Blocks) -> Vec<(usize, usize)> {
    let is_muon = matches!(route.role, ParameterRole::Muon { .. });
    let counts = blocks.batches().enumerate().map(|(index, batch @ [count, ..])| {
        let is_muon = is_muon && !route.left.contains(&index);
        (if is_muon { count } else { 0 }, batch.iter().product())
    });
    counts.collect()
}

impl ParameterAccount {
    fn new(
        path: String,
        (matrices, elements): (usize, usize),
        role: ParameterRole,
        by_rank: &[(usize, Entries)],
    ) -> Self {
        let found = by_rank.iter().filter_map(|(rank, entries)| Some((*rank, entries.get(&path)?)));
        let found: Vec<_> = found.collect();
        let by = found.first().map(|(_, entry)| entry.by.clone());
        // Without an entry on any rank, nothing has updated the parameter.
        let idle = match role {
            ParameterRole::Frozen => UpdatedBy::Frozen,
            _ => UpdatedBy::NoGradient,
        };
        Self {
            elements,
            updated_by: by.unwrap_or(idle),
            ranks: found.iter().map(|(rank, _)| *rank).collect(),
            matrices,
            iterations: found.iter().map(|(_, entry)| entry.iterations).sum(),
            iteration: found.iter().find_map(|(_, entry)| entry.iteration.clone()),
            update_norm: None,
            path,
        }
    }
}

impl GroupAccount {
    fn empty(updated_by: UpdatedBy) -> Self {
        Self {
            updated_by,
            tensors: 0,
            elements: 0,
            share: 0.0,
            ranks: BTreeSet::new(),
            matrices: 0,
            iterations: 0,
            used: BTreeSet::new(),
            update_norm: None,
        }
    }

    fn add(&mut self, parameter: &ParameterAccount, trained: usize) {
        self.tensors += 1;
        self.elements += parameter.elements;
        // Frozen parameters do not count in `trained`, which may be zero.
        if self.updated_by != UpdatedBy::Frozen {
            self.share = self.elements as f64 / trained as f64;
        }
        self.ranks.extend(&parameter.ranks);
        self.matrices += parameter.matrices;
        self.iterations += parameter.iterations;
        self.used.extend(parameter.iteration.iter().map(ToString::to_string));
        let norms = self.update_norm.into_iter().chain(parameter.update_norm);
        // Squares of norms add up, since parameters share no elements.
        self.update_norm = norms.reduce(f64::hypot);
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        let columns =
            ["matrices", "orthogonalised", "form, steps, type, kernel", "ranks", "update"];
        if f.alternate() {
            let first = ["parameter", "optimizer", "elements"];
            table.set_header(first.into_iter().chain(columns));
            self.parameters.iter().for_each(|each| _ = table.add_row(each.row()));
        } else {
            let first = ["optimizer", "tensors", "elements", "share"];
            table.set_header(first.into_iter().chain(columns));
            self.groups().iter().for_each(|group| _ = table.add_row(group.row()));
        }
        for column in table.column_iter_mut().skip(if f.alternate() { 2 } else { 1 }) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        write!(f, "{table}")
    }
}

impl ParameterAccount {
    fn row(&self) -> [String; 8] {
        let used = self.iteration.iter().map(ToString::to_string).collect();
        let last = cells((self.matrices, self.iterations), used, &self.ranks, self.update_norm);
        let [matrices, iterations, used, ranks, norm] = last;
        let (by, elements) = (self.updated_by.to_string(), self.elements.to_string());
        [self.path.clone(), by, elements, matrices, iterations, used, ranks, norm]
    }
}

impl GroupAccount {
    fn row(&self) -> [String; 9] {
        let used = self.used.iter().cloned().collect();
        let ranks: Vec<_> = self.ranks.iter().copied().collect();
        let last = cells((self.matrices, self.iterations), used, &ranks, self.update_norm);
        let [matrices, iterations, used, ranks, norm] = last;
        let share = format!("{:.1} %", 100.0 * self.share);
        let counts = [self.tensors, self.elements].map(|count| count.to_string());
        let ([tensors, elements], by) = (counts, self.updated_by.to_string());
        [by, tensors, elements, share, matrices, iterations, used, ranks, norm]
    }
}

/// The last cells of a row.
fn cells(
    (matrices, iterations): (usize, usize),
    used: Vec<String>,
    ranks: &[usize],
    norm: Option<f64>,
) -> [String; 5] {
    let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let count =
        // A dash where Muon has no part: a zero would look like iterations that were left out.
        |count: usize| if matrices + iterations == 0 { "-".into() } else { count.to_string() };
    let ranks: Vec<_> = ranks.iter().map(ToString::to_string).collect();
    let norm = norm.map(|norm| format!("{norm:.2e}"));
    [
        count(matrices),
        count(iterations),
        or_dash(used.join("; ")),
        or_dash(ranks.join(" ")),
        norm.unwrap_or("-".into()),
    ]
}

impl Routing {
    /// Requests the [`account`](Self::account) of the next step of Burn's optimizers that
    /// [`init`](Self::init) made of this routing. It costs a few entries on the host, and reads
    /// nothing from the device.
    pub fn request_account(&self) {
        self.updates().ledger().open(true);
    }

    /// Returns what the optimizers that [`init`](Self::init) made of this routing have done since
    /// the account was [requested](Self::request_account), and ends it: one step, if one was taken.
    /// `None` if it was not requested. The optimizers know of no ranks, and tell of 0.
    ///
    /// For a [`DistModuleOptimizer`](crate::DistModuleOptimizer), use its own method.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::{Device, Tensor};
    /// use distmuon::{MuonConfig, RoutingRule};
    ///
    /// let device = Device::default().autodiff();
    /// let model = LinearConfig::new(64, 256).init(&device);
    /// let routing = MuonConfig::new().with_rule(RoutingRule::muon("weight")).route(&model)?;
    /// let mut optim = routing.init();
    /// let loss = model.forward(Tensor::<2>::ones([8, 64], &device)).square().mean();
    /// let grads = GradientsParams::from_grads(loss.backward(), &model);
    /// routing.request_account();
    /// let model = optim.step(1e-3, model, grads);
    /// let account = routing.account().expect("it was requested");
    /// println!("{account}");
    /// assert_eq!(account.parameters[0].iterations, 1);
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn account(&self) -> Option<Account> {
        let entries = self.updates().ledger().close()?;
        Some(Account::new(self, &[(ONLY_RANK, entries)]))
    }
}
