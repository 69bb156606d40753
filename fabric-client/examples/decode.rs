//! The receiving side: leases slots, prints the offer, and reads what was delivered.
//!
//! ```text
//! cargo run --example decode -- /run/fabric/engine.sock engine tenant
//! ```
//!
//! Give the line that it prints to the example `prefill`, on this host or another.

#![forbid(unsafe_code)]

use std::error::Error;
use std::fmt::Write;

use fabric_client::proto::ids::{EngineName, RequestId, Tag, TenantId};
use fabric_client::proto::pool::{Arrangement, Layout, PoolSpec, TokenRange};
use fabric_client::{LeaseRequest, Session};

/// Keys and values of two layers of a model whose page holds 16 tokens in 4 KiB; room for 1,024.
fn spec() -> PoolSpec {
    PoolSpec {
        layout: Layout {
            // Whatever tells your models and their formats apart: pages move between equal tags.
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
    let [_, socket, engine, tenant] = &arguments[..] else {
        return Err("usage: decode SOCKET ENGINE TENANT".into());
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
    let lease = pool.receive(request).await?;
    let mut offer = String::new();
    for byte in lease.offer() {
        write!(offer, "{byte:02x}")?;
    }
    println!("{offer}");
    // Nothing of the pages can be reached before this, and nothing at all where it fails.
    let delivered = lease.delivered().await?;
    println!("payload: {}", String::from_utf8_lossy(delivered.payload()));
    for region in 0..pool.spec().layout.regions {
        let page = delivered.page(region, 0);
        println!("region {region}, position 0: {} ...", page[0]);
    }
    println!("{} pages, each verified", delivered.stats().pages);
    Ok(())
}
