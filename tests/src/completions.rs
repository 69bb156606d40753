//! A client of `POST /v1/completions`, whole and streamed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures_util::StreamExt;
use serde_json::{Value, json};

/// A request.
#[derive(Clone, Debug)]
pub struct Ask {
    /// For whom.
    pub tenant: String,
    /// OpenAI's fields, but for `stream`.
    pub body: Value,
}

/// An answer with status 200.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// The `fabric` object, null on a single node.
    pub fabric: Value,
    /// The `usage` object.
    pub usage: Value,
    /// From the request to the first piece of text.
    pub first: Duration,
    /// Events that had text.
    pub pieces: usize,
}

/// Any other answer.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The status.
    pub status: u16,
    /// The `Retry-After` header.
    pub retry_after: Option<String>,
    /// The body.
    pub body: String,
}

impl Ask {
    /// A greedy request.
    #[must_use]
    pub fn new(tenant: &str, prompt: &str, max_tokens: u32) -> Self {
        let body = json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0});
        Self {
            tenant: tenant.to_owned(),
            body,
        }
    }

    /// The same with seeded sampling.
    #[must_use]
    pub fn sampled(mut self, temperature: f64, seed: u64) -> Self {
        self.body["temperature"] = temperature.into();
        self.body["top_p"] = 0.9.into();
        self.body["seed"] = seed.into();
        self
    }

    /// Sends the request; gives the response as it comes.
    ///
    /// # Errors
    ///
    /// If nobody answers in time.
    pub async fn send(&self, http: &reqwest::Client, url: &str, stream: bool) -> Result<Response> {
        let mut body = self.body.clone();
        body["stream"] = stream.into();
        let sent = http
            .post(format!("{url}/v1/completions"))
            .header("X-Fabric-Tenant", &self.tenant)
            .timeout(LIMIT)
            .json(&body)
            .send();
        let begin = Instant::now();
        let response = sent.await.with_context(|| format!("ask {url}"))?;
        Ok(Response { response, begin })
    }

    /// Asks for a whole answer.
    ///
    /// # Errors
    ///
    /// If nobody answers, or not in the shape of a completion.
    pub async fn whole(
        &self,
        http: &reqwest::Client,
        url: &str,
    ) -> Result<std::result::Result<Answer, Refusal>> {
        let Response { response, begin } = self.send(http, url, false).await?;
        if response.status() != 200 {
            return Ok(Err(Refusal::read(response).await?));
        }
        let body: Value = response.json().await.context("read a completion")?;
        Ok(Ok(Answer {
            text: text_of(&body)?.to_owned(),
            fabric: body["fabric"].clone(),
            usage: body["usage"].clone(),
            first: begin.elapsed(),
            pieces: 1,
        }))
    }

    /// Asks for a streamed answer; `on_text` gets each piece.
    ///
    /// # Errors
    ///
    /// If nobody answers, or the stream is not in shape, or it ends early.
    pub async fn streamed(
        &self,
        http: &reqwest::Client,
        url: &str,
        on_text: impl FnMut(&str),
    ) -> Result<std::result::Result<Answer, Refusal>> {
        let response = self.send(http, url, true).await?;
        response.read(on_text).await
    }
}

/// A response whose body was not read yet. Dropping it disconnects.
#[derive(Debug)]
pub struct Response {
    response: reqwest::Response,
    begin: Instant,
}

impl Response {
    /// Reads a streamed response.
    ///
    /// # Errors
    ///
    /// As [`Ask::streamed`].
    pub async fn read(
        self,
        mut on_text: impl FnMut(&str),
    ) -> Result<std::result::Result<Answer, Refusal>> {
        let Self { response, begin } = self;
        if response.status() != 200 {
            return Ok(Err(Refusal::read(response).await?));
        }
        let mut answer = Answer {
            text: String::new(),
            fabric: Value::Null,
            usage: Value::Null,
            first: Duration::ZERO,
            pieces: 0,
        };
        let mut stream = response.bytes_stream();
        let mut buffer = Vec::new();
        while let Some(chunk) = stream.next().await {
            buffer.extend_from_slice(&chunk.context("read a stream")?);
            ensure!(buffer.len() < EVENT_BYTES_MAX, "an event without an end");
            while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = buffer.drain(..end + 2).collect();
                let event = String::from_utf8(event).context("an event is text")?;
                let data = event
                    .trim_end()
                    .strip_prefix("data: ")
                    .context("an event has data")?;
                if data == "[DONE]" {
                    return Ok(Ok(answer));
                }
                let body: Value = serde_json::from_str(data).context("an event is JSON")?;
                let text = text_of(&body)?;
                if !text.is_empty() {
                    if answer.pieces == 0 {
                        answer.first = begin.elapsed();
                    }
                    answer.pieces += 1;
                    answer.text.push_str(text);
                    on_text(text);
                }
                if body["usage"].is_object() {
                    answer.usage = body["usage"].clone();
                    answer.fabric = body["fabric"].clone();
                }
            }
        }
        bail!("the stream ended without [DONE] after {:?}", answer.text)
    }
}

impl Refusal {
    async fn read(response: reqwest::Response) -> Result<Self> {
        let retry_after = response.headers().get("retry-after");
        let retry_after = retry_after.and_then(|value| value.to_str().ok());
        Ok(Self {
            status: response.status().as_u16(),
            retry_after: retry_after.map(ToOwned::to_owned),
            body: response.text().await.context("read an error's body")?,
        })
    }
}

fn text_of(body: &Value) -> Result<&str> {
    let text = body["choices"][0]["text"].as_str();
    text.with_context(|| format!("a completion without text: {body}"))
}

/// A bound against hanging.
const LIMIT: Duration = Duration::from_secs(300);
const EVENT_BYTES_MAX: usize = 16 << 20;
