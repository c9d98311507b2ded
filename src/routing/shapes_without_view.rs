//! The error for parameters of more than two dimensions that have no view as matrices: all of them,
//! grouped by the types that hold them, with rules that suit them.

use super::ParameterRole;
use super::rules::Decision;
use crate::error::{Error, Result};
use crate::matrix_view::MatrixView;
use crate::parameters::{Field, Found};

/// Most parameters of a group whose shapes the error has.
const SHOWN: usize = 4;

/// Words in the names and types of weights of frequencies.
const FREQUENCIES: [&str; 4] = ["spectral", "fourier", "mode", "fft"];

/// Parameters of one type, with the same rules.
struct Group<'a> {
    holder: &'a str,
    kind: Kind,
    /// The expression that matches the paths of their modules.
    module: String,
    names: Vec<&'a str>,
    parameters: Vec<&'a Found>,
}

/// The probable meaning of a parameter of more than two dimensions.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Convolution,
    /// A vector for every head, or the like.
    Vectors,
    Frequencies,
    Stack,
}

/// Fails for trained parameters of more than two dimensions that Muon would see as one matrix, and
/// names all of them.
pub(super) fn ensure_views<'a>(
    decisions: impl Iterator<Item = (&'a Found, &'a Decision<'a>)>,
) -> Result<()> {
    let parameters: Vec<&Found> = decisions
        .filter_map(|(found, decision)| {
            let is_single =
                matches!(decision.role, ParameterRole::Muon { view: MatrixView::Single, .. });
            (is_single && found.shape.len() > 2).then_some(found)
        })
        .collect();
    if parameters.is_empty() {
        return Ok(());
    }
    let mut groups: Vec<Group<'_>> = vec![];
    for found in &parameters {
        let new = Group::of(found);
        let Some(group) = groups.iter_mut().find(|group| {
            (group.holder, group.kind, &group.module) == (new.holder, new.kind, &new.module)
        }) else {
            groups.push(new);
            continue;
        };
        group.parameters.push(found);
        if !group.names.contains(&found.name()) {
            group.names.push(found.name());
        }
    }
    let reports: Vec<String> = groups.iter().map(Group::report).collect();
    let parameters = parameters.iter().map(|found| found.path.clone()).collect();
    Err(Error::NoView { parameters, report: reports.join("\n") })
}

impl Kind {
    fn of(found: &Found) -> Self {
        let has = |word: &str| {
            let names = found.fields.iter().map(|field| &field.name);
            let mut names = names.chain(found.fields.last().map(|field| &field.holder));
            names.any(|name| name.to_lowercase().contains(word))
        };
        // A spectral convolution multiplies frequencies, and is none.
        if has("conv") && !FREQUENCIES.iter().any(|word| has(word)) {
            Self::Convolution
        // A dimension of 1 is there to broadcast: without it, these are at most a vector for every
        // index.
        } else if found.shape.iter().filter(|size| **size > 1).count() < 3 {
            Self::Vectors
        } else if FREQUENCIES.iter().any(|word| has(word)) {
            Self::Frequencies
        } else {
            Self::Stack
        }
    }
}

impl<'a> Group<'a> {
    fn of(found: &'a Found) -> Self {
        let above = &found.fields[..found.fields.len().saturating_sub(1)];
        let name = |field: &Field| match field.is_index() {
            // One rule for all layers of a list.
            true => r"\d+".to_owned(),
            false => regex::escape(&field.name),
        };
        Self {
            holder: found.holder(),
            kind: Kind::of(found),
            module: above.iter().map(|field| name(field) + r"\.").collect(),
            names: vec![found.name()],
            parameters: vec![found],
        }
    }

    /// The expression that matches the paths of the parameters.
    fn pattern(&self) -> String {
        let names: Vec<String> = self.names.iter().map(|name| regex::escape(name)).collect();
        let names = match &names[..] {
            [name] => name.clone(),
            _ => format!("({})", names.join("|")),
        };
        format!("r\"^{}{names}$\"", self.module)
    }

    fn report(&self) -> String {
        let shown: Vec<String> = self
            .parameters
            .iter()
            .take(SHOWN)
            .map(|found| format!("`{}` {:?}", found.path, found.shape))
            .collect();
        let more = match self.parameters.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let holder = match self.holder {
            "" => String::new(),
            holder => format!(" in `{holder}`"),
        };
        format!(
            "parameters{holder} can't be seen as matrices: expected two dimensions, got {}{more}; \
             add {}",
            shown.join(", "),
            self.remedy()
        )
    }

    /// The rules that suit the parameters, the most probable one first.
    fn remedy(&self) -> String {
        let pattern = self.pattern();
        let muon = |view: &str| format!("`.with_rule(RoutingRule::muon({pattern}).{view}())`");
        let adamw = format!("`.with_rule(RoutingRule::adamw({pattern}))`");
        match self.kind {
            Kind::Convolution => {
                format!("{} for a convolution that is not depthwise, or {adamw}", muon("flatten"))
            }
            Kind::Vectors => format!("{adamw} for vectors"),
            Kind::Frequencies => {
                format!("{adamw}, or {} for a matrix of every frequency", muon("leading"))
            }
            Kind::Stack => format!(
                "{} for a stack of matrices, with `.leading()` instead if they are in the first \
                 two dimensions, or {adamw}",
                muon("batch")
            ),
        }
    }
}
