//! Other hosts: `fabric-test-host` serves on each, and runs processes for a test on another.
//!
//! One connection is one request, a line of JSON; for a process then frames both ways, which carry
//! its standard streams. A process ends with its connection, so whoever is killed here is killed
//! there. There is no authentication: for hosts that a test has made, on a wire of their own.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream as StdTcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::programs::own_binary;

/// Where processes run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Host {
    /// The address that its processes listen on.
    pub ip: IpAddr,
    /// Who runs them. `None`: this is the host.
    pub agent: Option<SocketAddr>,
}

/// What an agent is asked for.
#[derive(Debug, Deserialize, Serialize)]
pub enum Request {
    /// Runs a process.
    Run {
        /// Its program.
        program: PathBuf,
        /// Its arguments.
        arguments: Vec<String>,
        /// Variables beside the agent's own.
        environment: BTreeMap<String, String>,
    },
    /// Writes a file, with the folders that it is in.
    Put {
        /// Where.
        path: PathBuf,
        /// Its content, in hexadecimal.
        content: String,
    },
    /// Switches the host off at once, as a power cut would.
    PowerOff,
}

impl Host {
    /// This host, on loopback.
    #[must_use]
    pub fn here() -> Self {
        Self {
            ip: Ipv4Addr::LOCALHOST.into(),
            agent: None,
        }
    }

    /// The two hosts of a test: another one, by `FABRIC_TEST_AGENT=IP:PORT`, and this one, which
    /// the other reaches by `FABRIC_TEST_IP`.
    ///
    /// # Errors
    ///
    /// If either variable is missing or malformed.
    pub fn pair() -> Result<[Self; 2]> {
        let value = |name: &str| std::env::var(name).with_context(|| format!("{name} is not set"));
        let agent = value("FABRIC_TEST_AGENT")?;
        let agent: SocketAddr = agent
            .parse()
            .with_context(|| format!("FABRIC_TEST_AGENT={agent}"))?;
        let ip = value("FABRIC_TEST_IP")?;
        let here = Self {
            ip: ip.parse().with_context(|| format!("FABRIC_TEST_IP={ip}"))?,
            agent: None,
        };
        let other = Self {
            ip: agent.ip(),
            agent: Some(agent),
        };
        Ok([other, here])
    }

    /// A command for a program on this host, or through its agent.
    ///
    /// # Errors
    ///
    /// If the program that talks to agents cannot be built.
    pub fn command(&self, program: &Path) -> Result<Command> {
        let Some(agent) = self.agent else {
            return Ok(Command::new(program));
        };
        let mut command = Command::new(own_binary("fabric-test-host")?);
        command.args(["on", &agent.to_string(), "--"]).arg(program);
        Ok(command)
    }

    /// Has the same files there as here, under the same paths.
    ///
    /// # Errors
    ///
    /// If one cannot be read or written.
    pub fn put_folder(&self, folder: &Path) -> Result<()> {
        if self.agent.is_none() {
            return Ok(());
        }
        for entry in std::fs::read_dir(folder).context("list a folder")? {
            let path = entry.context("list a folder")?.path();
            if path.is_dir() {
                self.put_folder(&path)?;
            } else if path.is_file() {
                let content = std::fs::read(&path).context("read a file")?;
                let content = hex::encode(content);
                self.ask(&Request::Put { path, content })?;
            }
        }
        Ok(())
    }

    /// Switches the host off, as a power cut would: it does not answer.
    ///
    /// # Errors
    ///
    /// If it is this one, or does not listen.
    pub fn power_off(&self) -> Result<()> {
        let mut agent = self.connect()?;
        send_line(&mut agent, &Request::PowerOff)
    }

    /// Waits until the agent listens: after a power cut, until the host is back.
    ///
    /// # Errors
    ///
    /// If it does not in time.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while let Err(error) = self.connect() {
            if Instant::now() > deadline {
                return Err(error.context(format!("not within {limit:?}")));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    fn connect(&self) -> Result<StdTcpStream> {
        let agent = self.agent.context("this host has no agent")?;
        let stream = StdTcpStream::connect_timeout(&agent, CONNECT_LIMIT);
        stream.with_context(|| format!("connect to the agent at {agent}"))
    }

    fn ask(&self, request: &Request) -> Result<()> {
        let mut agent = self.connect()?;
        send_line(&mut agent, request)?;
        let mut answer = String::new();
        agent
            .read_to_string(&mut answer)
            .context("hear the agent")?;
        ensure!(answer == "done", "the agent says: {answer}");
        Ok(())
    }
}

fn send_line(agent: &mut StdTcpStream, request: &Request) -> Result<()> {
    agent
        .write_all(line(request)?.as_bytes())
        .context("ask the agent")
}

fn line(request: &Request) -> Result<String> {
    Ok(serde_json::to_string(request).context("write a request")? + "\n")
}

/// Serves requests for ever.
///
/// # Errors
///
/// If the address cannot be listened on.
pub async fn serve(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("listen on {address}"))?;
    loop {
        let (stream, _) = listener.accept().await.context("accept")?;
        tokio::spawn(async move {
            if let Err(error) = handle(stream).await {
                eprintln!("fabric-test-host: {error:#}");
            }
        });
    }
}

async fn handle(stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true).context("set an option")?;
    let (reading, mut writing) = stream.into_split();
    let mut reading = BufReader::new(reading);
    let mut line = String::new();
    let asked = reading.read_line(&mut line).await;
    if asked.context("read a request")? == 0 {
        return Ok(()); // Who only looked whether we listen.
    }
    match serde_json::from_str(&line).context("understand a request")? {
        Request::Run {
            program,
            arguments,
            environment,
        } => {
            let mut command = tokio::process::Command::new(program);
            command.args(arguments).envs(environment);
            attend(command, reading, writing).await
        }
        Request::Put { path, content } => {
            let answer = match put(&path, &content) {
                Ok(()) => "done".to_owned(),
                Err(error) => format!("{error:#}"),
            };
            writing.write_all(answer.as_bytes()).await.context("answer")
        }
        // M: proc(5), /proc/sysrq-trigger: at once, nothing is synchronised or told.
        Request::PowerOff => std::fs::write("/proc/sysrq-trigger", "o").context("switch off"),
    }
}

fn put(path: &Path, content: &str) -> Result<()> {
    let content = hex::decode(content).context("hexadecimal digits")?;
    let folder = path.parent().context("a file is in a folder")?;
    std::fs::create_dir_all(folder).context("make folders")?;
    let mut options = std::fs::OpenOptions::new();
    // Keys are among them.
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path).context("open a file")?;
    file.write_all(&content).context("write a file")
}

/// Runs a process whose streams are a connection's; kills it where the connection ends.
async fn attend(
    mut command: tokio::process::Command,
    mut reading: impl AsyncReadExt + Unpin,
    mut writing: impl AsyncWriteExt + Unpin,
) -> Result<()> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("start {command:?}"))?;
    let mut input = child.stdin.take();
    let (sender, mut frames) = mpsc::channel(FRAMES_MAX);
    let output = child.stdout.take().context("it is piped")?;
    let errors = child.stderr.take().context("it is piped")?;
    let outputs = tokio::spawn(async move {
        tokio::join!(
            pump(output, Stream::Output, sender.clone()),
            pump(errors, Stream::Errors, sender.clone()),
        );
    });
    let inputs = async {
        while let Some((stream, bytes)) = receive(&mut reading).await? {
            ensure!(stream == Stream::Input, "not for a process");
            if bytes.is_empty() {
                input = None;
            } else if let Some(input) = &mut input {
                // It may have ended.
                drop(input.write_all(&bytes).await);
            }
        }
        anyhow::Ok(())
    };
    let told = async {
        while let Some((stream, bytes)) = frames.recv().await {
            send(&mut writing, stream, &bytes).await?;
        }
        anyhow::Ok(())
    };
    // Until the process has closed its streams, or whoever asked for it is gone.
    let is_gone = tokio::select! {
        gone = inputs => { gone?; true }
        told = told => { told?; false }
    };
    if is_gone {
        return child.kill().await.context("kill a process");
    }
    outputs.await.context("pump the streams")?;
    let status = child.wait().await.context("wait for a process")?;
    let code = status.code().unwrap_or(SIGNALLED);
    send(&mut writing, Stream::Status, &code.to_le_bytes()).await
}

/// Runs a program on another host, as if it were here; its exit status.
///
/// # Errors
///
/// If the agent does not serve, or goes away.
pub async fn run_on(agent: SocketAddr, program: &Path, arguments: Vec<String>) -> Result<u8> {
    let stream = TcpStream::connect(agent).await;
    let stream = stream.with_context(|| format!("connect to the agent at {agent}"))?;
    stream.set_nodelay(true).context("set an option")?;
    let (mut reading, mut writing) = stream.into_split();
    let kept = |name: &str| name.starts_with("FABRIC_") || name.starts_with("RUST_");
    let request = Request::Run {
        program: program.to_owned(),
        arguments,
        environment: std::env::vars().filter(|(name, _)| kept(name)).collect(),
    };
    let line = line(&request)?;
    writing.write_all(line.as_bytes()).await.context("ask")?;
    let (sender, mut frames) = mpsc::channel(FRAMES_MAX);
    // A thread, as what it waits for cannot be given up.
    std::thread::spawn(move || pump_input(&sender));
    tokio::spawn(async move {
        while let Some((stream, bytes)) = frames.recv().await {
            if send(&mut writing, stream, &bytes).await.is_err() {
                return;
            }
        }
        // The end of this half would be taken for ours.
        std::future::pending::<()>().await;
    });
    while let Some((stream, bytes)) = receive(&mut reading).await? {
        match stream {
            Stream::Output => {
                let mut out = std::io::stdout().lock();
                out.write_all(&bytes)
                    .and_then(|()| out.flush())
                    .context("print")?;
            }
            Stream::Errors => std::io::stderr().write_all(&bytes).context("print")?,
            Stream::Status => {
                let code: [u8; 4] = bytes[..].try_into().context("a status has four bytes")?;
                return Ok(u8::try_from(i32::from_le_bytes(code)).unwrap_or(u8::MAX));
            }
            Stream::Input => bail!("the agent sends what only we send"),
        }
    }
    bail!("the host at {agent} is gone")
}

/// What a frame is of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stream {
    /// Standard input; an empty frame ends it.
    Input,
    Output,
    Errors,
    /// The exit status.
    Status,
}

async fn pump(
    mut from: impl AsyncReadExt + Unpin,
    stream: Stream,
    into: mpsc::Sender<(Stream, Vec<u8>)>,
) {
    let mut bytes = vec![0; FRAME_BYTES_MAX];
    while let Ok(count) = from.read(&mut bytes).await {
        if count == 0 || into.send((stream, bytes[..count].to_vec())).await.is_err() {
            return;
        }
    }
}

/// Standard input; an empty frame is its end.
fn pump_input(into: &mpsc::Sender<(Stream, Vec<u8>)>) {
    let mut bytes = vec![0; FRAME_BYTES_MAX];
    loop {
        // What cannot be read has ended.
        let count = std::io::stdin().read(&mut bytes).unwrap_or(0);
        let frame = (Stream::Input, bytes[..count].to_vec());
        if into.blocking_send(frame).is_err() || count == 0 {
            return;
        }
    }
}

async fn send(into: &mut (impl AsyncWriteExt + Unpin), stream: Stream, bytes: &[u8]) -> Result<()> {
    let mut frame = vec![stream as u8];
    let length = u32::try_from(bytes.len()).context("a frame is small")?;
    frame.extend(length.to_le_bytes());
    frame.extend(bytes);
    into.write_all(&frame).await.context("send a frame")
}

/// The next frame; `None` at the end.
async fn receive(from: &mut (impl AsyncReadExt + Unpin)) -> Result<Option<(Stream, Vec<u8>)>> {
    let Ok(kind) = from.read_u8().await else {
        return Ok(None);
    };
    let streams = [
        Stream::Input,
        Stream::Output,
        Stream::Errors,
        Stream::Status,
    ];
    let stream = *streams
        .get(usize::from(kind))
        .with_context(|| format!("no stream {kind}"))?;
    let length = from.read_u32_le().await.context("a frame's length")? as usize;
    ensure!(length <= FRAME_BYTES_MAX, "a frame of {length} bytes");
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes).await.context("a frame")?;
    Ok(Some((stream, bytes)))
}

const CONNECT_LIMIT: Duration = Duration::from_secs(2);
const FRAME_BYTES_MAX: usize = 64 * 1024;
/// Frames that may wait.
const FRAMES_MAX: usize = 16;
/// Instead of an exit status, as shells have it.
const SIGNALLED: i32 = 128;
