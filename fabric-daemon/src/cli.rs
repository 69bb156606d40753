//! The command line: parse, log, run, exit code.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use fabric_daemon::config::{self, Config, ConfigError, Log, LogFormat};
use fabric_daemon::store::{self, Origin};
use serde_json::json;
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

/// Moves KV cache between the engines of a cluster, safely: one daemon for each host.
#[derive(Debug, Parser)]
#[command(name = "fabric-daemon", version, after_help = AFTER_HELP, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check a configuration file, and say what it switches on.
    Check {
        /// The configuration file.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Print a whole configuration file: every key, what it means, its default, unit and bounds.
    Config,
    /// Make this node's identity (a certificate and its key), unless it has one; print the node id.
    Init {
        /// Where the identity is kept: as `state_dir` in the configuration.
        #[arg(long, value_name = "DIR")]
        state_dir: PathBuf,
        /// Print a JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Run the daemon, in the foreground. Logs go to standard error.
    Serve {
        /// The configuration file.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
}

const AFTER_HELP: &str = "\
To begin, on each host:
  1. fabric-daemon init --state-dir /var/lib/fabric       prints the node id
  2. fabric-daemon config > /etc/fabric/daemon.toml       then name in it the engines, and the
                                                          node ids of the other hosts
  3. fabric-daemon check --config /etc/fabric/daemon.toml
  4. fabric-daemon serve --config /etc/fabric/daemon.toml

SIGTERM or SIGINT: stop admitting, drain, fence what does not drain, exit. Again: exit at once.

Exit codes:
   0  all went well; after a signal: everything was drained
   1  failure; after a signal: not everything was drained within shutdown.grace_ms
   2  wrong usage
  78  the configuration file is wrong
";

/// Runs the program, from its arguments to its exit code.
pub(crate) fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Check { config } => check(&config).map(|()| ExitCode::SUCCESS),
        Command::Config => print_config().map(|()| ExitCode::SUCCESS),
        Command::Init { state_dir, json } => init(&state_dir, json).map(|()| ExitCode::SUCCESS),
        Command::Serve { config } => serve(&config),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            // Not the chain: each message has its cause in it.
            eprintln!("fabric-daemon: {}", error.to_string().trim_end());
            if error.downcast_ref::<ConfigError>().is_some() {
                ExitCode::from(EXIT_CONFIG)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

fn check(path: &Path) -> Result<()> {
    let config = Config::load(path)?;
    println!(
        "{} is right: planes {:?}, {} engines, {} peers",
        path.display(),
        config.planes,
        config.engines.len(),
        config.peers.len()
    );
    Ok(())
}

fn print_config() -> Result<()> {
    let mut out = std::io::stdout().lock();
    Ok(out.write_all(config::template().as_bytes())?)
}

fn init(state_dir: &Path, as_json: bool) -> Result<()> {
    let made = store::init(state_dir)?;
    if as_json {
        let created = made.origin == Origin::Made;
        let state_dir = state_dir.display().to_string();
        let node = made.node.to_string();
        println!(
            "{}",
            json!({ "node": node, "created": created, "state_dir": state_dir })
        );
    } else {
        println!("{}", made.node);
    }
    Ok(())
}

/// Once there is a log, what goes wrong is said there.
fn serve(path: &Path) -> Result<ExitCode> {
    let config = Config::load(path)?;
    start_log(&config.log);
    std::panic::set_hook(Box::new(|panic| {
        // A defect: carrying on could break what the machine promises. Crashing cannot: the next
        // life refuses all that came before (S6).
        let backtrace = std::backtrace::Backtrace::force_capture();
        error!("{panic}\n{backtrace}");
        std::process::abort();
    }));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(fabric_daemon::run(config));
    // Tasks that still block (a scrub) end with the process.
    runtime.shutdown_background();
    match result {
        Ok(()) => {
            info!("exit");
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            error!("{error}");
            Ok(ExitCode::FAILURE)
        }
    }
}

fn start_log(log: &Log) {
    let filter = EnvFilter::try_new(&log.level).expect("the configuration was checked");
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match log.format {
        LogFormat::Json => subscriber.json().init(),
        LogFormat::Text => subscriber.init(),
    }
}

/// M: sysexits(3): `EX_CONFIG`.
const EXIT_CONFIG: u8 = 78;

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_its_help_has_the_exit_codes() {
        Cli::command().debug_assert();
        let help = Cli::command().render_long_help().to_string();
        for text in ["serve", "init", "check", "78", "SIGTERM", "daemon.toml"] {
            assert!(help.contains(text), "{text} is missing from\n{help}");
        }
    }
}
