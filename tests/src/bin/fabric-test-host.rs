//! Runs processes for a test on another host: see `fabric_tests::host`.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use fabric_tests::host;

/// A test's other host: see its source.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves whoever connects, without asking who it is.
    Serve {
        /// Where to listen.
        address: SocketAddr,
    },
    /// Runs a program on the host of an agent, as if it were here.
    On {
        /// The agent's address.
        agent: SocketAddr,
        /// The program's path there.
        program: PathBuf,
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new()?;
    let code = runtime.block_on(async {
        match Cli::parse().command {
            Command::Serve { address } => host::serve(address).await.map(|()| 0),
            Command::On {
                agent,
                program,
                arguments,
            } => host::run_on(agent, &program, arguments).await,
        }
    })?;
    // Standard input may still be waited for.
    runtime.shutdown_background();
    Ok(ExitCode::from(code))
}
