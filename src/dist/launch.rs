//! What a launcher tells every process of: its rank, the number of ranks, and where rank 0 waits.

use std::{env, fmt};

use burn::tensor::Device;

use super::world::World;
use crate::error::{Error, Result};

/// The place of a process among those that a launcher started.
///
/// Its [`Debug`] output does not show the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank, starting at 0.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// This process's index on its host, which chooses the device.
    pub local_rank: usize,
    /// Where rank 0 waits for the others, if the launcher says so: a host and a port.
    pub address: Option<(String, u16)>,
    /// The secret that lets processes into the world (`DISTMUON_SECRET`). May be empty.
    pub secret: String,
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world_size, local_rank, address, secret } = self;
        // Logs are read by more people than the secret is for.
        let secret = if secret.is_empty() { "empty" } else { "set" };
        f.debug_struct("Launch")
            .field("rank", rank)
            .field("world_size", world_size)
            .field("local_rank", local_rank)
            .field("address", address)
            .field("secret", &format_args!("({secret})"))
            .finish()
    }
}

/// The variables in which launchers write rank, number of ranks, and rank on the host.
const LAUNCHERS: [[&str; 3]; 4] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"], // torchrun
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"], // Open MPI
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"], // MPICH, Intel MPI
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"], // Slurm's srun
];

impl Launch {
    /// Reads the variables of torchrun, else of Open MPI, MPICH, or Slurm, from the environment.
    ///
    /// `MASTER_ADDR` and `MASTER_PORT` say where rank 0 waits. Where torchrun keeps the port for a store
    /// of its own (`TORCHELASTIC_USE_AGENT_STORE`), it is the one after it.
    ///
    /// # Errors
    ///
    /// [`Error::Launch`] with the variable that is absent or makes no sense.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| env::var(name).ok())
    }

    /// [`from_env`](Self::from_env), for any source of variables.
    ///
    /// ```
    /// use distmuon::dist::Launch;
    ///
    /// let torchrun = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "host"), ("MASTER_PORT", "29500")];
    /// let value = |name: &str| torchrun.iter().find(|(key, _)| *key == name).map(|(_, v)| v.to_string());
    /// let launch = Launch::from_variables(value)?;
    /// assert_eq!((launch.rank, launch.world_size), (1, 2));
    /// assert_eq!(launch.address, Some(("host".into(), 29500)));
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let launcher = LAUNCHERS.iter().find(|[rank, ..]| variable(rank).is_some());
        let [rank, size, local] = *launcher.ok_or_else(|| {
            absent(
                "RANK",
                "start the program with torchrun, mpirun or srun, or use `World::from_env_or_alone` or \
                 `World::threads`",
            )
        })?;
        let number = |name: &str| match variable(name) {
            Some(value) => value.parse::<usize>().map(Some).map_err(|error| {
                wrong(name, &value, &error.to_string(), "set it to a whole number")
            }),
            None => Ok(None),
        };
        let required = |name| {
            number(name)?
                .ok_or_else(|| absent(name, "set it as the launcher of the other variables does"))
        };
        let (own, world_size) = (required(rank)?, required(size)?);
        if own >= world_size {
            let reason = format!("there are {world_size} ranks, from 0");
            return Err(wrong(rank, &own.to_string(), &reason, "number the ranks from 0"));
        }
        let port = number("MASTER_PORT")?;
        let next = variable("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let port = port.map(|port| {
            let port = port + usize::from(next);
            let out = |_| {
                wrong(
                    "MASTER_PORT",
                    &port.to_string(),
                    "no port is that high",
                    "take 1024 to 65534",
                )
            };
            u16::try_from(port).map_err(out)
        });
        let address = match (variable("MASTER_ADDR"), port.transpose()?) {
            (Some(host), Some(port)) => Some((host, port)),
            (None, None) => None,
            (Some(_), None) => return Err(absent("MASTER_PORT", "set it beside MASTER_ADDR")),
            (None, Some(_)) => return Err(absent("MASTER_ADDR", "set it beside MASTER_PORT")),
        };
        let secret = variable("DISTMUON_SECRET").unwrap_or_default();
        // A launcher that says nothing of hosts runs on one.
        let local_rank = number(local)?.unwrap_or(own);
        Ok(Self { rank: own, world_size, local_rank, address, secret })
    }

    /// Returns `true` if a launcher's variables are in the environment.
    pub fn is_in_env() -> bool {
        let speaks = |[rank, ..]: &[&str; 3]| env::var(rank).is_ok_and(|value| !value.is_empty());
        LAUNCHERS.iter().any(speaks)
    }

    /// The default backend's device of this process's rank on its host, with autodiff.
    pub fn device(&self) -> Device {
        World::devices(self.local_rank + 1).swap_remove(self.local_rank)
    }

    /// The address, where an engine can't do without.
    ///
    /// # Errors
    ///
    /// [`Error::Launch`] if there is none.
    #[cfg(feature = "cuda")]
    pub(super) fn known_address(&self) -> Result<(&str, u16)> {
        let address = self.address.as_ref().map(|(host, port)| (host.as_str(), *port));
        address.ok_or_else(|| {
            absent(
                "MASTER_ADDR",
                "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there",
            )
        })
    }
}

fn absent(variable: &str, remedy: &'static str) -> Error {
    wrong(variable, "not set", "the world can't be known without it", remedy)
}

fn wrong(variable: &str, value: &str, reason: &str, remedy: &'static str) -> Error {
    Error::Launch {
        variable: variable.to_owned(),
        value: value.to_owned(),
        reason: reason.to_owned(),
        remedy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Result<Launch> {
        Launch::from_variables(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_launcher_is_understood() {
        for [rank, size, local] in LAUNCHERS {
            let launch = launch(&[(rank, "5"), (size, "8"), (local, "1")]).unwrap();
            assert_eq!((launch.rank, launch.world_size, launch.local_rank), (5, 8, 1));
            assert_eq!((launch.address, launch.secret), (None, String::new()));
        }
        let both = [("SLURM_PROCID", "0"), ("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "")];
        let launch = launch(&both).unwrap();
        assert_eq!((launch.rank, launch.local_rank), (1, 1));
    }

    #[test]
    fn torchruns_own_store_keeps_its_port() {
        let own =
            [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")];
        let kept = [&own[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(launch(&own).unwrap().address, Some(("h".into(), 29500)));
        assert_eq!(launch(&kept).unwrap().address, Some(("h".into(), 29501)));
    }

    #[test]
    fn the_secret_is_not_in_debug_output() {
        let variables = [("RANK", "0"), ("WORLD_SIZE", "1"), ("DISTMUON_SECRET", "hush")];
        let launch = launch(&variables).unwrap();
        assert_eq!(launch.secret, "hush");
        let text = format!("{launch:?} {launch:#?}");
        assert!(!text.contains("hush") && text.contains("secret: (set)"), "{text}");
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let base = [("RANK", "1"), ("WORLD_SIZE", "2")];
        let with = |more: &[(&'static str, &'static str)]| launch(&[more, &base[..]].concat());
        for (variables, named) in [
            (launch(&[]), "RANK is not set"),
            (launch(&[("RANK", "1")]), "WORLD_SIZE is not set"),
            (launch(&[("PMI_RANK", "1")]), "PMI_SIZE is not set"),
            (with(&[("RANK", "2")]), "RANK is 2: there are 2 ranks"),
            (with(&[("RANK", "-1")]), "RANK is -1"),
            (with(&[("WORLD_SIZE", "many")]), "WORLD_SIZE is many"),
            (with(&[("LOCAL_RANK", "x")]), "LOCAL_RANK is x"),
            (with(&[("MASTER_ADDR", "h")]), "MASTER_PORT is not set"),
            (with(&[("MASTER_PORT", "1")]), "MASTER_ADDR is not set"),
            (with(&[("MASTER_ADDR", "h"), ("MASTER_PORT", "65536")]), "MASTER_PORT is 65536"),
        ] {
            let error = variables.unwrap_err().to_string();
            assert!(error.starts_with(named), "{error}");
        }
    }
}
