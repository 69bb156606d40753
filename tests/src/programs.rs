//! Where the programs are that a cluster runs; builds them where they are missing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// The two programs of a cluster.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `fabric-daemon`, built with deliberate faults.
    pub daemon: PathBuf,
    /// `fabric-engine`.
    pub engine: PathBuf,
}

impl Programs {
    /// Finds both: `FABRIC_DAEMON` and `FABRIC_ENGINE`, else built beside this program; the daemon
    /// with what these planes need.
    ///
    /// # Errors
    ///
    /// If one is named and is not there, or cannot be built.
    pub fn find(planes: &[&str]) -> Result<Self> {
        let daemon = Self::find_daemon(planes)?;
        let engine = locate("FABRIC_ENGINE", "fabric-engine", &[])?;
        Ok(Self { daemon, engine })
    }

    /// Finds the daemon alone, for what needs no model.
    ///
    /// # Errors
    ///
    /// As [`Programs::find`].
    pub fn find_daemon(planes: &[&str]) -> Result<PathBuf> {
        let mut features = vec!["fault-injection"];
        features.extend(planes.contains(&"verbs").then_some("rdma"));
        locate("FABRIC_DAEMON", "fabric-daemon", &features)
    }
}

/// The binary `name` of this crate, beside this program.
///
/// # Errors
///
/// If it cannot be built.
pub fn own_binary(name: &str) -> Result<PathBuf> {
    let (folder, profile) = build_folder()?;
    let path = folder.join(name);
    // Cargo builds a crate's binaries before its integration tests, but not for its other binaries.
    if !path.exists() {
        let mut command = cargo_build("fabric-tests", &profile, &folder);
        run(command.args(["--bin", name]), name)?;
    }
    ensure!(path.exists(), "{} was not built", path.display());
    Ok(path)
}

fn locate(variable: &str, name: &str, features: &[&str]) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        let path = PathBuf::from(path);
        ensure!(path.exists(), "{variable}={} is not there", path.display());
        return Ok(path);
    }
    let (folder, profile) = build_folder()?;
    // Always asked for: a binary of an older tree would be tested in its place, in silence.
    let mut command = cargo_build(name, &profile, &folder);
    for feature in features {
        command.args(["--features", feature]);
    }
    run(&mut command, name)?;
    let path = folder.join(name);
    ensure!(path.exists(), "{} was not built", path.display());
    Ok(path)
}

/// The folder of this build's binaries, and its profile's name.
fn build_folder() -> Result<(PathBuf, String)> {
    let own = std::env::current_exe().context("find this program")?;
    let mut folder = own.parent().context("this program is in a folder")?;
    if folder.ends_with("deps") {
        folder = folder.parent().context("deps is in a folder")?;
    }
    let name = folder.file_name().and_then(|name| name.to_str());
    let name = name.context("the build folder has a name")?;
    let profile = if name == "debug" { "dev" } else { name };
    Ok((folder.to_owned(), profile.to_owned()))
}

fn cargo_build(package: &str, profile: &str, folder: &Path) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new(cargo);
    command.current_dir(workspace);
    command.args(["build", "--locked", "-p", package, "--profile", profile]);
    if let Some(target) = folder.parent() {
        command.env("CARGO_TARGET_DIR", target);
    }
    command
}

fn run(command: &mut Command, what: &str) -> Result<()> {
    eprintln!("building {what} (at once where it is fresh, else a few minutes)");
    // Standard output is for what the caller prints; cargo's own progress goes to standard error.
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    let status = status.context("run cargo")?;
    if !status.success() {
        bail!("build {what}: cargo ended with {status}");
    }
    Ok(())
}
