//! Helper processes that are driven by lines.

use std::path::{Path, PathBuf};
use std::process::{Command as StdCommand, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

/// A process that takes commands as lines on its standard input, and answers with lines.
#[derive(Debug)]
pub struct LineChild {
    name: String,
    log: PathBuf,
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
    /// Lines that were read while another was waited for.
    early: Vec<String>,
}

impl LineChild {
    /// Starts a process; its standard error goes to `log`.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn spawn(name: &str, command: StdCommand, log: &Path) -> Result<Self> {
        let path = log.to_owned();
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(log);
        let mut child = Command::from(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log.with_context(|| format!("open the log of {name}"))?)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        let input = child.stdin.take().context("standard input is piped")?;
        let output = child.stdout.take().context("standard output is piped")?;
        let (sender, lines) = mpsc::channel(LINES_MAX);
        tokio::spawn(async move {
            let mut output = BufReader::new(output).lines();
            while let Ok(Some(line)) = output.next_line().await {
                if sender.send(line).await.is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            name: name.to_owned(),
            log: path,
            child,
            input,
            lines,
            early: Vec::new(),
        })
    }

    /// Says a line.
    ///
    /// # Errors
    ///
    /// If the process does not listen any more.
    pub async fn say(&mut self, line: &str) -> Result<()> {
        let text = format!("{line}\n");
        let said = self.input.write_all(text.as_bytes()).await;
        said.with_context(|| format!("tell {}: {line}", self.name))?;
        self.input
            .flush()
            .await
            .with_context(|| format!("flush to {}", self.name))
    }

    /// Waits for a line that starts with `prefix`; keeps others for later.
    ///
    /// # Errors
    ///
    /// If the process ends, or none comes in time.
    pub async fn expect(&mut self, prefix: &str, limit: Duration) -> Result<String> {
        if let Some(at) = self.early.iter().position(|line| line.starts_with(prefix)) {
            return Ok(self.early.remove(at));
        }
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            match tokio::time::timeout_at(deadline, self.lines.recv()).await {
                Err(_) => bail!(
                    "{} did not say {prefix:?} within {limit:?}; it said {:?}",
                    self.name,
                    self.early
                ),
                Ok(None) => bail!(
                    "{} ended before it said {prefix:?}; its log: {}",
                    self.name,
                    std::fs::read_to_string(&self.log).unwrap_or_else(|error| error.to_string())
                ),
                Ok(Some(line)) if line.starts_with(prefix) => return Ok(line),
                Ok(Some(line)) => self.early.push(line),
            }
        }
    }

    /// Says a line and waits for the answer.
    ///
    /// # Errors
    ///
    /// As [`LineChild::say`] and [`LineChild::expect`].
    pub async fn ask(&mut self, line: &str, prefix: &str, limit: Duration) -> Result<String> {
        self.say(line).await?;
        self.expect(prefix, limit).await
    }

    /// The process, while it was not waited for.
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn pid(&self) -> Result<u32> {
        self.child
            .id()
            .with_context(|| format!("{} has ended", self.name))
    }

    /// Sends a signal.
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.pid()?).context("a pid")?;
        let pid = Pid::from_raw(pid).context("a pid is not 0")?;
        kill_process(pid, signal).with_context(|| format!("signal {}", self.name))
    }

    /// Kills the process, and waits until it is gone.
    ///
    /// # Errors
    ///
    /// If it cannot be waited for.
    pub async fn kill(&mut self) -> Result<()> {
        self.child
            .kill()
            .await
            .with_context(|| format!("kill {}", self.name))
    }
}

/// The lines of this process's standard input, as its parent says them; ends with it.
#[must_use]
pub fn commands() -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(std::result::Result::ok) {
            if sender.blocking_send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// Lines that may wait to be read.
const LINES_MAX: usize = 4096;
