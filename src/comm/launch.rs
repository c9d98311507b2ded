//! The variables by which a launcher describes the world to every process: its rank, the number of
//! ranks, and the address of rank 0.

use std::{env, fmt};

use burn::tensor::Device;

use super::devices::devices;
use crate::error::{Error, Result};

/// The place of one process among those that a launcher started: its rank, the number of ranks, and
/// the address of rank 0.
///
/// The [`Debug`] output does not show the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank, starting at 0.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// This process's index on its host, starting at 0. The index selects the device.
    pub local_rank: usize,
    /// The host and the port at which rank 0 listens, if the launcher sets them.
    pub address: Option<(String, u16)>,
    /// The secret that a process needs to join the world (`DISTMUON_SECRET`). May be empty.
    pub secret: String,
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world_size, local_rank, address, secret } = self;
        // More people may read the logs than may know the secret.
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

/// The variables for the rank, the number of ranks, and the rank on the host, one row per launcher.
/// The first row whose rank is set is used.
const LAUNCHERS: [[&str; 3]; 4] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"], // torchrun
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"], // Open MPI
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"], // MPICH, Intel MPI
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"], // Slurm's srun
];

impl Launch {
    /// Reads the variables of torchrun, or else of Open MPI, MPICH or Slurm, from the environment.
    ///
    /// `MASTER_ADDR` and `MASTER_PORT` are the address of rank 0. If torchrun uses that port for
    /// its store (`TORCHELASTIC_USE_AGENT_STORE`), rank 0 listens at the next port.
    ///
    /// # Errors
    ///
    /// [`Error::Launch`] with the variable that is absent or invalid.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| env::var(name).ok())
    }

    /// Reads the variables of [`from_env`](Self::from_env) from any source.
    ///
    /// ```
    /// use std::collections::HashMap;
    ///
    /// use distmuon::comm::Launch;
    ///
    /// let torchrun = HashMap::from([
    ///     ("RANK", "1"),
    ///     ("WORLD_SIZE", "2"),
    ///     ("MASTER_ADDR", "host"),
    ///     ("MASTER_PORT", "29500"),
    /// ]);
    /// let variable = |name: &str| torchrun.get(name).map(|value| value.to_string());
    /// let launch = Launch::from_variables(variable)?;
    /// assert_eq!((launch.rank, launch.world_size), (1, 2));
    /// assert_eq!(launch.address, Some(("host".into(), 29500)));
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        const BOTH: &str = "set both MASTER_ADDR and MASTER_PORT, or neither";
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        // In this order: a job of Slurm also sets its variables where mpirun or torchrun start the
        // processes.
        let launcher = LAUNCHERS.iter().find(|[rank, ..]| variable(rank).is_some());
        let [rank_name, size_name, local_rank_name] = *launcher.ok_or_else(|| {
            absent(
                "RANK",
                "start the program with torchrun, mpirun or srun, or use `World::launch` or \
                 `World::threads`",
            )
        })?;
        let number = |name: &str| match variable(name) {
            Some(value) => value.parse::<usize>().map(Some).map_err(|error| {
                invalid(name, &value, &error.to_string(), "set it to a whole number")
            }),
            None => Ok(None),
        };
        let required = |name| {
            number(name)?
                .ok_or_else(|| absent(name, "set it as the launcher of the other variables does"))
        };
        let rank = required(rank_name)?;
        let world_size = required(size_name)?;
        if rank >= world_size {
            let reason = format!("there are {world_size} ranks, from 0");
            return Err(invalid(rank_name, &rank.to_string(), &reason, "number the ranks from 0"));
        }
        let port = number("MASTER_PORT")?;
        // torchrun keeps a store of its own at that port then: rank 0 takes the next one.
        let is_taken_by_torchrun =
            variable("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let port = port.map(|port| {
            let port = port + usize::from(is_taken_by_torchrun);
            u16::try_from(port).map_err(|_| {
                let remedy = "set a port from 1024 to 65534";
                invalid("MASTER_PORT", &port.to_string(), "the highest port is 65535", remedy)
            })
        });
        let address = match (variable("MASTER_ADDR"), port.transpose()?) {
            (Some(host), Some(port)) => Some((host, port)),
            (None, None) => None,
            (Some(_), None) => return Err(absent("MASTER_PORT", BOTH)),
            (None, Some(_)) => return Err(absent("MASTER_ADDR", BOTH)),
        };
        let secret = variable("DISTMUON_SECRET").unwrap_or_default();
        // A launcher that does not set the rank on the host starts all processes on one host.
        let local_rank = number(local_rank_name)?.unwrap_or(rank);
        Ok(Self { rank, world_size, local_rank, address, secret })
    }

    /// Returns `true` if a launcher's variables are in the environment.
    ///
    /// ```
    /// use distmuon::comm::Launch;
    ///
    /// let number_of_ranks = if Launch::is_in_env() { Launch::from_env()?.world_size } else { 1 };
    /// # let _ = number_of_ranks;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn is_in_env() -> bool {
        LAUNCHERS.iter().any(|[rank, ..]| env::var(rank).is_ok_and(|value| !value.is_empty()))
    }

    /// Returns the default backend's device for this process's rank on its host, with autodiff.
    pub fn device(&self) -> Device {
        devices(self.local_rank + 1).swap_remove(self.local_rank)
    }

    /// Returns the address, for an engine that needs one.
    ///
    /// # Errors
    ///
    /// [`Error::Launch`] without an address.
    #[cfg(feature = "cuda")]
    pub(super) fn required_address(&self) -> Result<(&str, u16)> {
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
    invalid(variable, "not set", "it is needed to find the other ranks", remedy)
}

fn invalid(variable: &str, value: &str, reason: &str, remedy: &'static str) -> Error {
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
    fn variables_of_every_launcher_are_read() {
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
    fn rank_0_listens_at_the_next_port_if_torchrun_uses_the_first() {
        let plain =
            [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")];
        let with_store = [&plain[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(launch(&plain).unwrap().address, Some(("h".into(), 29500)));
        assert_eq!(launch(&with_store).unwrap().address, Some(("h".into(), 29501)));
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
    fn an_absent_or_invalid_variable_is_named() {
        let base = [("RANK", "1"), ("WORLD_SIZE", "2")];
        let with = |more: &[(&'static str, &'static str)]| launch(&[more, &base[..]].concat());
        for (outcome, start) in [
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
            let error = outcome.unwrap_err().to_string();
            assert!(error.starts_with(start), "{error}");
        }
    }
}
