//! The engine's session with its local daemon: connected again whenever it ends.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use fabric_client::{Pool, Session};
use fabric_proto::ids::{EngineName, Tag};
use fabric_proto::pool::{Arrangement, Layout, PoolSpec};

use super::error::ServeError;
use crate::kv::KvShape;

/// How long the first attempt to connect again waits.
const RETRY_MIN: Duration = Duration::from_millis(100);
/// How long a later one waits at most.
const RETRY_MAX: Duration = Duration::from_secs(2);

/// Where the pool is, while there is one.
#[derive(Clone)]
pub(super) struct Fabric {
    pool: Arc<RwLock<Option<Pool>>>,
}

/// How to get a pool.
#[derive(Clone, Debug)]
pub(super) struct Registration {
    pub(super) socket: PathBuf,
    pub(super) name: EngineName,
    pub(super) spec: PoolSpec,
}

impl Fabric {
    /// Connects, registers the pool, and keeps both up until the process ends.
    pub(super) async fn connect(registration: Registration) -> anyhow::Result<Self> {
        let (session, pool) = registration.register().await?;
        let fabric = Self {
            pool: Arc::new(RwLock::new(Some(pool))),
        };
        tokio::spawn(fabric.clone().keep(registration, session));
        Ok(fabric)
    }

    /// The pool.
    pub(super) fn pool(&self) -> Result<Pool, ServeError> {
        let pool = self
            .pool
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        pool.ok_or_else(|| ServeError::Busy("the session with the local daemon is down".into()))
    }

    async fn keep(self, registration: Registration, mut session: Session) {
        loop {
            session.closed().await;
            tracing::warn!("the session with the local daemon ended");
            self.set(None);
            session = self.again(&registration).await;
            tracing::info!("connected to the local daemon again");
        }
    }

    async fn again(&self, registration: &Registration) -> Session {
        let mut wait = RETRY_MIN;
        loop {
            tokio::time::sleep(wait).await;
            match registration.register().await {
                Ok((session, pool)) => {
                    self.set(Some(pool));
                    return session;
                }
                Err(error) => tracing::debug!("connect again: {error:#}"),
            }
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    fn set(&self, pool: Option<Pool>) {
        *self.pool.write().unwrap_or_else(PoisonError::into_inner) = pool;
    }
}

impl Registration {
    async fn register(&self) -> anyhow::Result<(Session, Pool)> {
        let session = Session::connect(&self.socket, self.name.clone()).await?;
        let pool = session.register_pool(self.spec).await?;
        Ok((session, pool))
    }
}

/// The pool of a model: one region for each layer's K and V.
pub(super) fn pool_spec(
    model: &str,
    shape: KvShape,
    slots: u32,
    context_tokens: u64,
) -> anyhow::Result<PoolSpec> {
    let layout = Layout {
        model: model_digest(model, shape),
        regions: u16::try_from(shape.regions())?,
        page_bytes: u32::try_from(shape.page_bytes())?,
        tokens_per_slot: u16::try_from(shape.tokens_per_slot)?,
    };
    Ok(PoolSpec {
        layout,
        slots,
        arrangement: Arrangement::RegionMajor,
        context_tokens,
    })
}

/// Everything that gives a page's bytes their meaning.
fn model_digest(model: &str, shape: KvShape) -> Tag {
    let KvShape {
        layers,
        kv_heads,
        head_dim,
        tokens_per_slot,
    } = shape;
    let text = format!(
        "{model}\nf16 [token][head][dim]\n{layers} {kv_heads} {head_dim} {tokens_per_slot}"
    );
    Tag(*blake3::hash(text.as_bytes()).as_bytes())
}
