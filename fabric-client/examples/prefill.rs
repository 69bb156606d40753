//! The sending side: fills pages for an offer, region after region, and hears how it ended.
//!
//! ```text
//! cargo run --example prefill -- /run/fabric/engine.sock engine tenant OFFER
//! ```
//!
//! The offer is the line that the example `decode` prints.

#![forbid(unsafe_code)]

use std::error::Error;

use fabric_client::proto::ids::{EngineName, RequestId, Tag, TenantId};
use fabric_client::proto::outcome::Outcome;
use fabric_client::proto::pool::{Arrangement, Layout, PoolSpec, TokenRange};
use fabric_client::{LeaseRequest, Session};

/// The layout is that of the example `decode`; the number of slots need not be.
fn spec() -> PoolSpec {
    PoolSpec {
        layout: Layout {
            model: Tag(*b"an example's model, version 0001"),
            regions: 4,
            page_bytes: 4096,
            tokens_per_slot: 16,
        },
        slots: 64,
        arrangement: Arrangement::RegionMajor,
        context_tokens: 1024,
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, socket, engine, tenant, offer] = &arguments[..] else {
        return Err("usage: prefill SOCKET ENGINE TENANT OFFER".into());
    };
    let session = Session::connect(socket, EngineName::new(engine)?).await?;
    let pool = session.register_pool(spec()).await?;
    let request = LeaseRequest {
        tenant: TenantId::new(tenant)?,
        request: RequestId::new("example")?,
        tokens: TokenRange {
            start: 0,
            count: 100,
        },
        named: Vec::new(),
    };
    let held = pool.hold(request).await?;
    let mut sending = held.send(from_hex(offer)?.into()).await?;
    let slots = sending.slots();
    for region in 0..pool.spec().layout.regions {
        for position in 0..slots {
            let value = u8::try_from(region)?;
            sending.page_mut(region, position).fill(value);
        }
        // Checksummed and on its way, while the next region is filled.
        sending.seal(region, 0..slots).await?;
    }
    let (outcome, _held) = sending.finish("the first token".into()).await;
    println!("{outcome}");
    if outcome == Outcome::Delivered {
        Ok(())
    } else {
        Err("the pages were not delivered".into())
    }
}

fn from_hex(text: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let pairs = text.as_bytes().chunks(2);
    let byte = |pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?);
    pairs.map(byte).collect()
}
