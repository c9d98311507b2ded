//! The certificate of a run: a hash chain of its settings, its data, and the bits of its weights
//! after every step.
//!
//! Two runs with equal [chains](Certificate::chain) had equal settings and data, and equal weights
//! after every recorded step. Ranks, engine and placement are written down beside the chain, and
//! are no part of it: where [equal bits] are promised, the chains are equal on any of them.
//!
//! The hashes are XXH3 in 128 bits. They tell runs apart that differ by accident, and prove nothing
//! about a file that someone has forged.
//!
//! [equal bits]: crate::guide::ranks

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit};
use crate::replaced_file;

/// The certificate of a run.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use distmuon::MuonConfig;
/// use distmuon::certificate::{Certificate, Link, Ranks};
///
/// let model = LinearConfig::new(64, 256).init(&Device::default());
/// let mut certificate = Certificate::new(&MuonConfig::new(), "tokens of 2026-11-27");
/// certificate.computed_by("one rank");
/// certificate.record(0, &model)?; // before the first step, and after every step
/// println!("{}", certificate.chain());
/// for Link { step, weights, .. } in certificate.links() {
///     println!("{step}: {weights}");
/// }
/// let Ranks { after_step, description } = &certificate.ranks()[0];
/// println!("{description}, after step {after_step}");
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certificate {
    /// The version of this crate.
    version: String,
    /// The settings of the run.
    settings: Value,
    /// The data, or a digest of it.
    data: String,
    /// The ranks of every part of the run.
    ranks: Vec<Ranks>,
    links: Vec<Link>,
}

/// The ranks that have computed a part of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranks {
    /// The number of steps before it.
    pub after_step: usize,
    /// The ranks, as in [`World::describe`](crate::World::describe), and the placement.
    pub description: String,
}

/// The weights after a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The number of steps that were taken.
    pub step: usize,
    /// The digest of the weights: of the path, the shape, the type and the bits of every parameter.
    pub weights: String,
    /// The digest of the chain up to here.
    pub chain: String,
}

impl Certificate {
    /// Returns the certificate of a run before its first record, with its settings and a digest of
    /// its data.
    ///
    /// # Panics
    ///
    /// If the settings can't be written as JSON.
    pub fn new(settings: &impl Serialize, data: impl ToString) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            settings: serde_json::to_value(settings).expect("settings are valid JSON"),
            data: data.to_string(),
            ranks: vec![],
            links: vec![],
        }
    }

    /// Writes down the ranks that compute the run from here on. They are no part of the chain.
    pub fn computed_by(&mut self, description: impl ToString) {
        let after_step = self.links.last().map_or(0, |link| link.step);
        self.ranks.push(Ranks { after_step, description: description.to_string() });
    }

    /// Adds the weights after a step, or those before the first one as step 0. The model has to be
    /// whole: see [`Layout::unshard`](crate::distributed::Layout::unshard). Only one rank has to
    /// make this call.
    ///
    /// It reads all parameters on the host.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] if the step is not later than the last one.
    pub fn record<M: Module>(&mut self, step: usize, model: &M) -> Result<()> {
        if let Some(last) = self.links.last().filter(|last| last.step >= step) {
            return Err(Error::usage(
                "the step of a certificate is not a new one",
                "a step after the last one",
                format!("step {step} after step {}", last.step),
                "record every step once, or continue a certificate by `resume`",
            ));
        }
        let weights = digest_of(model);
        let chain = self.next(step, &weights);
        self.links.push(Link { step, weights, chain });
        Ok(())
    }

    /// The digest of the chain after a further link.
    fn next(&self, step: usize, weights: &str) -> String {
        let before = match self.links.last() {
            Some(link) => link.chain.clone(),
            // Keys of JSON objects are sorted, so that equal settings are equal texts.
            None => text(xxh3_128(
                serde_json::to_string(&(&self.version, &self.settings, &self.data))
                    .expect("settings are valid JSON")
                    .as_bytes(),
            )),
        };
        text(xxh3_128(format!("{before} {step} {weights}").as_bytes()))
    }

    /// Returns the digest of all that was recorded: empty before the first record.
    pub fn chain(&self) -> &str {
        self.links.last().map_or("", |link| &link.chain)
    }

    /// Returns what was recorded, in the order of the steps.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Returns the ranks that have computed the run.
    pub fn ranks(&self) -> &[Ranks] {
        &self.ranks
    }

    /// Continues this certificate, of a run that was interrupted, from a checkpoint: forgets the
    /// steps after it.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] if other settings, data or weights were recorded at that step, or none.
    pub fn resume<M: Module>(mut self, of: &Self, step: usize, model: &M) -> Result<Self> {
        const EXPECTED: &str = "the settings, data and weights of the checkpoint";
        const REMEDY: &str =
            "continue the run of the file, with its settings, or give another file";
        let other =
            |got: String| Error::usage("the certificate is of another run", EXPECTED, got, REMEDY);
        let differs = [
            difference("version", Some(&json!(self.version)), Some(&json!(of.version))),
            difference("settings", Some(&self.settings), Some(&of.settings)),
            difference("data", Some(&json!(self.data)), Some(&json!(of.data))),
        ];
        if let Some(difference) = differs.into_iter().flatten().next() {
            return Err(other(difference));
        }
        // The run takes the steps after the checkpoint again.
        self.links.retain(|link| link.step <= step);
        // Ranks from `step` on have computed none of the steps that remain.
        self.ranks.retain(|ranks| ranks.after_step < step);
        match self.links.last().filter(|link| link.step == step) {
            None => Err(other(format!("none of step {step}"))),
            Some(link) if link.weights != digest_of(model) => {
                Err(other(format!("other weights after step {step}")))
            }
            Some(_) => Ok(self),
        }
    }

    /// Reads a certificate, and computes its chain again.
    ///
    /// # Errors
    ///
    /// [`Error::Certificate`] if it can't be read, or its chain is broken.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |reason: String| Error::Certificate {
            path: path.to_owned(),
            reason,
            remedy: "give the file as a run has written it",
        };
        let bytes = fs::read(path).map_err(|error| failed(error.to_string()))?;
        let read: Self = serde_json::from_slice(&bytes)
            .map_err(|error| failed(format!("it is no certificate: {error}")))?;
        // The copy grows link by link, as when it was recorded: `next` goes on from the last one.
        let mut again = Self { links: vec![], ..read.clone() };
        for link in &read.links {
            if again.next(link.step, &link.weights) != link.chain {
                let reason = format!("its chain is broken at step {}", link.step);
                return Err(failed(reason));
            }
            again.links.push(link.clone());
        }
        Ok(read)
    }

    /// Writes the certificate as JSON, and replaces the file at the path as a whole.
    ///
    /// # Errors
    ///
    /// [`Error::Certificate`] if it can't be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let failed = |reason: String| Error::Certificate {
            path: path.to_owned(),
            reason,
            remedy: "name a file in a folder that can be written to",
        };
        let bytes = serde_json::to_vec_pretty(self).expect("a certificate is valid JSON");
        // A program that dies in the middle leaves the old file whole.
        let (scratch, mut file) =
            replaced_file::create(path).map_err(|error| failed(error.to_string()))?;
        file.write_all(&bytes).map_err(|error| failed(error.to_string()))?;
        drop(file);
        scratch.commit().map_err(|error| failed(error.to_string()))
    }
}

/// The first difference between two values of a name, in the order of the keys of objects.
fn difference(name: &str, recorded: Option<&Value>, of_run: Option<&Value>) -> Option<String> {
    match (recorded, of_run) {
        (Some(Value::Object(fields)), Some(Value::Object(others))) => {
            let keys: BTreeSet<&String> = fields.keys().chain(others.keys()).collect();
            keys.into_iter().find_map(|key| {
                difference(&format!("{name}.{key}"), fields.get(key), others.get(key))
            })
        }
        _ if recorded == of_run => None,
        _ => {
            let [recorded, of_run] = [recorded, of_run]
                .map(|value| value.map_or_else(|| "none".to_owned(), Value::to_string));
            Some(format!("other {name}: {of_run}, and {recorded} in the file"))
        }
    }
}

fn text(digest: u128) -> String {
    format!("{digest:032x}")
}

/// The digest of the weights of a whole model.
fn digest_of<M: Module>(model: &M) -> String {
    struct Weights(Xxh3);
    impl Visit for Weights {
        fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
            // One at a time, so that the host never has copies of two parameters.
            let data = param.val().without_autodiff().into_data();
            // The lengths are in the text, so that no two models are one sequence of bytes.
            let of =
                format!("{} {:?} {:?}\n", parameters::path(fields), data.shape(), data.dtype());
            self.0.update(of.as_bytes());
            self.0.update(data.as_bytes());
        }
    }
    let mut weights = Weights(Xxh3::new());
    parameters::visit(model, &mut weights);
    text(weights.0.digest128())
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    fn model() -> Linear {
        LinearConfig::new(4, 4).init(&Device::default())
    }

    /// The model with another lowest bit in one weight.
    fn flipped(mut model: Linear) -> Linear {
        model.weight = model.weight.map(|weight| {
            let mut values: Vec<f32> = weight.to_data().iter::<f32>().collect();
            values[5] = f32::from_bits(values[5].to_bits() ^ 1);
            let data = TensorData::new(values, weight.shape());
            Tensor::from_data(data, (&weight.device(), DType::F32))
        });
        model
    }

    fn recorded(settings: &str, data: &str, models: &[&Linear]) -> Certificate {
        let mut certificate = Certificate::new(&settings, data);
        certificate.computed_by("a rank");
        for (step, model) in models.iter().enumerate() {
            certificate.record(step, *model).unwrap();
        }
        certificate
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_to_a_certificate_stays() {
        let folder = tempfile::tempdir().unwrap();
        let [link, file] = ["latest.json", "run.json"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink("run.json", &link).unwrap();
        let certificate = recorded("a", "b", &[&model()]);
        certificate.write(&link).unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(Certificate::read(&file).unwrap().chain(), certificate.chain());
    }

    #[test]
    fn a_chain_depends_on_settings_data_and_every_bit_and_not_on_ranks() {
        let (model, other) = (model(), flipped(model()));
        let flipped = flipped(model.clone());
        let first = recorded("a", "b", &[&model, &model, &model]);
        let mut elsewhere = first.clone();
        elsewhere.computed_by("other ranks");
        assert_eq!(first.chain(), elsewhere.chain());
        for changed in [
            recorded("A", "b", &[&model, &model, &model]),
            recorded("a", "B", &[&model, &model, &model]),
            recorded("a", "b", &[&model, &flipped, &model]),
            recorded("a", "b", &[&model, &model, &other]),
            recorded("a", "b", &[&model, &model]),
        ] {
            assert_ne!(first.chain(), changed.chain());
        }
    }

    #[test]
    fn a_damaged_file_is_an_error_that_names_the_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        let model = model();
        let certificate = recorded("a", "b", &[&model, &model, &model]);
        certificate.write(&path).unwrap();
        assert_eq!(Certificate::read(&path).unwrap(), certificate);
        let read = fs::read_to_string(&path).unwrap();
        let weights = &certificate.links()[2].weights;
        let position = read.rfind(weights.as_str()).expect("the digest is written");
        let mut damaged = read.clone().into_bytes();
        damaged[position] = if damaged[position] == b'0' { b'1' } else { b'0' };
        for (bytes, reason) in [
            (damaged, "its chain is broken at step 2"),
            (read.replace("\"a\"", "\"c\"").into_bytes(), "its chain is broken at step 0"),
            (read.as_bytes()[..read.len() / 2].to_vec(), "it is no certificate"),
        ] {
            fs::write(&path, bytes).unwrap();
            let error = Certificate::read(&path).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
        assert!(Certificate::read(folder.path().join("none")).is_err());
        assert!(certificate.write(folder.path().join("no folder/run.json")).is_err());
    }

    #[test]
    fn a_certificate_continues_with_the_same_weights_only() {
        let (model, new) = (model(), recorded("a", "b", &[]));
        let other = flipped(model.clone());
        let whole = recorded("a", "b", &[&model, &other, &model]);
        let mut resumed = whole.clone().resume(&new, 1, &other).unwrap();
        resumed.record(2, &model).unwrap();
        assert_eq!(resumed.chain(), whole.chain());
        for (error, reason) in [
            (whole.clone().resume(&new, 1, &model), "other weights after step 1"),
            (whole.clone().resume(&new, 3, &model), "none of step 3"),
            (whole.clone().resume(&recorded("A", "b", &[]), 1, &other), "other settings"),
            (whole.clone().resume(&recorded("a", "B", &[]), 1, &other), "other data"),
        ] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let error = resumed.record(2, &model).unwrap_err().to_string();
        assert!(error.contains("step 2 after step 2"), "{error}");
    }
}
