/* A stand-in for libibverbs that does next to nothing: one device with one active RoCE v2 port,
 * whose queue pairs are connected to others of the same process by number. Bytes never move. What
 * is left of a transfer is what its caller does for it, which is what this is there to count; and
 * ten thousand transfers take seconds.
 *
 *   post_send:  WRITE, BIND_MW         complete at once, if signalled
 *               SEND_WITH_INV / _IMM   take a receive of the peer, which completes too
 *   modify_qp:  to ERR                 flushes the receives
 *   otherwise                          an error that a device could give, and then ERR
 *
 * What is checked, as it is part of what a caller has to keep track of:
 * - keys: a write needs one that is open, to its queue pair; a bind needs the window's key as it
 *   was before, as with soft-RoCE; a message invalidates a bound window alone. Bounds are not;
 * - that queues are not overrun: a work request's place is free again once a completion that came
 *   after it was polled;
 * - that no object goes before those made from it, nor a queue pair before the windows bound on it.
 *
 * Environment:
 *   NULL_VERBS_COUNTS     a file to which one line of counts is added when the process ends
 *   NULL_VERBS_POLL_MAX   most completions of one poll: 1 for a device that has them one by one
 */
#define _GNU_SOURCE

#include <infiniband/verbs.h>

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#undef ibv_get_device_list
#undef ibv_query_port

enum {
    QUEUE_PAIRS_MAX = 1 << 20, /* In the life of the process: a number is never used again. */
    QUEUE_PAIRS_FIRST = 17,
    KEYS_MAX = 1 << 20, /* As above. */
    COMPLETIONS_MAX = 1 << 20,
    REQUESTS_MAX = 1 << 15,
};

struct completion {
    struct ibv_wc wc;
    struct queue_pair *queue_pair; /* Null: of one that was destroyed, to be passed over. */
    uint32_t requests;             /* Places in its send queue that are free once it was polled. */
};

struct completion_queue {
    struct ibv_cq cq;
    struct completion *ring;
    uint32_t capacity;
    uint32_t first;
    uint32_t count;
    uint32_t users;
    bool wants_event;
    bool is_overrun;
};

struct queue_pair {
    struct ibv_qp qp;
    struct queue_pair *peer; /* Null: not looked for yet, or gone. */
    uint32_t peer_number;
    uint32_t sends_max;
    uint32_t sends;
    uint32_t unsignalled; /* Since the last signalled one. */
    uint64_t *receives;
    uint32_t receives_max;
    uint32_t receives_first;
    uint32_t receives_count;
    uint32_t windows; /* That are bound on it. */
};

/* What a key opens, found by all but its last eight bits. */
struct key {
    uint32_t key;          /* 0: nothing. */
    bool opens_region;     /* To whoever is connected. */
    struct queue_pair *on; /* Of a window: what it is bound on. Null: nothing. */
};

struct channel {
    struct ibv_comp_channel channel;
    int in;
};

static struct {
    uint64_t doorbells; /* Calls of post_send. */
    uint64_t writes;
    uint64_t bytes; /* That the writes did not move. */
    uint64_t binds;
    uint64_t messages;
    uint64_t receives;
    uint64_t polls;
    uint64_t completions; /* Taken by them. */
} counts;

static struct {
    int64_t contexts, domains, channels, queues, queue_pairs, regions, windows;
} objects;

static struct queue_pair *queue_pairs[QUEUE_PAIRS_MAX];
static uint32_t next_number = QUEUE_PAIRS_FIRST;
static struct key keys[KEYS_MAX];
static uint32_t next_key = 1;
static int poll_max = INT32_MAX;

/* One lock for all. Of its own making: a mutex would be counted as the C library's. */
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void lock(void)
{
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
        sched_yield();
    }
}

static void unlock(void)
{
    atomic_flag_clear_explicit(&busy, memory_order_release);
}

static void *fail(int code)
{
    errno = code;
    return NULL;
}

/* ---- keys ---- */

static struct key *key_of(uint32_t key)
{
    struct key *found = &keys[(key >> 8) % KEYS_MAX];
    return key != 0 && found->key == key ? found : NULL;
}

/* A key that was never used; 0: there is none. */
static uint32_t new_key(bool opens_region)
{
    if (next_key == KEYS_MAX) {
        return 0;
    }
    uint32_t key = next_key++ << 8;
    keys[key >> 8] = (struct key){.key = key, .opens_region = opens_region};
    return key;
}

static void unbind(struct key *window)
{
    if (window->on != NULL) {
        window->on->windows -= 1;
        window->on = NULL;
    }
}

/* ---- completions ---- */

static void complete(struct ibv_cq *cq, struct queue_pair *queue_pair, uint64_t wr_id,
                     enum ibv_wc_status status, enum ibv_wc_opcode opcode, uint32_t number,
                     unsigned int flags, uint32_t requests)
{
    struct completion_queue *queue = (struct completion_queue *)cq;
    if (queue->count == queue->capacity) {
        queue->is_overrun = true;
        return;
    }
    uint32_t index = queue->first + queue->count;
    if (index >= queue->capacity) {
        index -= queue->capacity;
    }
    queue->count += 1;
    struct completion *completion = &queue->ring[index];
    completion->queue_pair = queue_pair;
    completion->requests = requests;
    completion->wc.wr_id = wr_id;
    completion->wc.status = status;
    completion->wc.opcode = opcode;
    completion->wc.imm_data = number;
    completion->wc.wc_flags = flags;
    completion->wc.qp_num = queue_pair->qp.qp_num;
    if (queue->wants_event) {
        struct channel *channel = (struct channel *)queue->cq.channel;
        queue->wants_event = false;
        /* One pending event a queue: a pipe holds far more. */
        if (channel != NULL && write(channel->in, &cq, sizeof(cq)) != sizeof(cq)) {
            abort();
        }
    }
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
    struct completion_queue *queue = (struct completion_queue *)cq;
    int polled = 0;
    if (most > poll_max) {
        most = poll_max;
    }
    lock();
    counts.polls += 1;
    if (queue->is_overrun) {
        polled = -1;
        errno = EIO;
        most = -1;
    }
    while (polled < most && queue->count > 0) {
        struct completion *completion = &queue->ring[queue->first];
        queue->first += 1;
        if (queue->first == queue->capacity) {
            queue->first = 0;
        }
        queue->count -= 1;
        if (completion->queue_pair != NULL) {
            completion->queue_pair->sends -= completion->requests;
            wc[polled] = completion->wc;
            polled += 1;
        }
    }
    counts.completions += polled > 0 ? (uint64_t)polled : 0;
    unlock();
    return polled;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
    (void)solicited_only;
    lock();
    ((struct completion_queue *)cq)->wants_event = true;
    unlock();
    return 0;
}

/* ---- work requests ---- */

static void flush_receives(struct queue_pair *queue_pair)
{
    while (queue_pair->receives_count > 0) {
        uint32_t index = queue_pair->receives_first % queue_pair->receives_max;
        queue_pair->receives_first += 1;
        queue_pair->receives_count -= 1;
        complete(queue_pair->qp.recv_cq, queue_pair, queue_pair->receives[index],
                 IBV_WC_WR_FLUSH_ERR, 0, 0, 0, 0);
    }
}

static void fault(struct queue_pair *queue_pair)
{
    queue_pair->qp.state = IBV_QPS_ERR;
    flush_receives(queue_pair);
}

/* The other end, if it takes anything in. */
static struct queue_pair *peer_of(struct queue_pair *queue_pair)
{
    struct queue_pair *peer = queue_pair->peer;
    if (peer == NULL) {
        peer = queue_pairs[queue_pair->peer_number];
        if (peer == NULL || peer->peer_number != queue_pair->qp.qp_num) {
            return NULL;
        }
        queue_pair->peer = peer;
    }
    bool takes = peer->qp.state == IBV_QPS_RTR || peer->qp.state == IBV_QPS_RTS;
    return takes ? peer : NULL;
}

/* A message of no bytes to the other end. */
static enum ibv_wc_status deliver(struct queue_pair *peer, const struct ibv_send_wr *wr)
{
    if (peer->receives_count == 0) {
        return IBV_WC_RNR_RETRY_EXC_ERR;
    }
    if (wr->opcode == IBV_WR_SEND_WITH_INV) {
        struct key *window = key_of(wr->invalidate_rkey);
        if (window == NULL || window->on != peer) {
            return IBV_WC_REM_ACCESS_ERR;
        }
        unbind(window);
    }
    uint32_t index = peer->receives_first % peer->receives_max;
    peer->receives_first += 1;
    peer->receives_count -= 1;
    unsigned int flags = wr->opcode == IBV_WR_SEND_WITH_INV ? IBV_WC_WITH_INV : IBV_WC_WITH_IMM;
    complete(peer->qp.recv_cq, peer, peer->receives[index], IBV_WC_SUCCESS, IBV_WC_RECV,
             wr->imm_data, flags, 0);
    return IBV_WC_SUCCESS;
}

static enum ibv_wc_status bind(struct queue_pair *queue_pair, const struct ibv_send_wr *wr)
{
    struct key *window = key_of(wr->bind_mw.mw->rkey);
    if (window == NULL || window->opens_region || window->on != NULL ||
        wr->bind_mw.rkey >> 8 != window->key >> 8 || wr->bind_mw.rkey == window->key) {
        return IBV_WC_MW_BIND_ERR;
    }
    window->key = wr->bind_mw.rkey;
    window->on = queue_pair;
    queue_pair->windows += 1;
    return IBV_WC_SUCCESS;
}

static enum ibv_wc_status perform(struct queue_pair *queue_pair, const struct ibv_send_wr *wr,
                                  enum ibv_wc_opcode *opcode)
{
    struct queue_pair *peer = peer_of(queue_pair);
    if (queue_pair->qp.state == IBV_QPS_ERR) {
        return IBV_WC_WR_FLUSH_ERR;
    }
    if (peer == NULL) {
        return IBV_WC_RETRY_EXC_ERR;
    }
    if (wr->opcode == IBV_WR_RDMA_WRITE) {
        struct key *key = key_of(wr->wr.rdma.rkey);
        if (key == NULL || !(key->opens_region || key->on == peer)) {
            return IBV_WC_REM_ACCESS_ERR;
        }
        counts.writes += 1;
        for (int piece = 0; piece < wr->num_sge; piece++) {
            counts.bytes += wr->sg_list[piece].length;
        }
        *opcode = IBV_WC_RDMA_WRITE;
        return IBV_WC_SUCCESS;
    }
    if (wr->opcode == IBV_WR_BIND_MW) {
        counts.binds += 1;
        *opcode = IBV_WC_BIND_MW;
        return bind(queue_pair, wr);
    }
    if (wr->opcode == IBV_WR_SEND_WITH_INV || wr->opcode == IBV_WR_SEND_WITH_IMM) {
        counts.messages += 1;
        *opcode = IBV_WC_SEND;
        return deliver(peer, wr);
    }
    return IBV_WC_LOC_QP_OP_ERR;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct queue_pair *queue_pair = (struct queue_pair *)qp;
    int code = 0;
    lock();
    counts.doorbells += 1;
    for (; wr != NULL; wr = wr->next) {
        if (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_ERR) {
            code = EINVAL;
            break;
        }
        if (queue_pair->sends == queue_pair->sends_max) {
            code = ENOMEM;
            break;
        }
        enum ibv_wc_opcode opcode = 0;
        enum ibv_wc_status status = perform(queue_pair, wr, &opcode);
        queue_pair->sends += 1;
        queue_pair->unsignalled += 1;
        if (status != IBV_WC_SUCCESS || (wr->send_flags & IBV_SEND_SIGNALED) != 0) {
            complete(qp->send_cq, queue_pair, wr->wr_id, status, opcode, 0, 0,
                     queue_pair->unsignalled);
            queue_pair->unsignalled = 0;
        }
        if (status == IBV_WC_REM_ACCESS_ERR) {
            fault(queue_pair->peer);
        }
        if (status != IBV_WC_SUCCESS) {
            fault(queue_pair);
        }
    }
    unlock();
    *bad = wr;
    return code;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct queue_pair *queue_pair = (struct queue_pair *)qp;
    int code = 0;
    lock();
    for (; wr != NULL; wr = wr->next) {
        if (qp->state == IBV_QPS_RESET) {
            code = EINVAL;
            break;
        }
        if (queue_pair->receives_count == queue_pair->receives_max) {
            code = ENOMEM;
            break;
        }
        counts.receives += 1;
        uint32_t index = queue_pair->receives_first + queue_pair->receives_count;
        queue_pair->receives[index % queue_pair->receives_max] = wr->wr_id;
        queue_pair->receives_count += 1;
        if (qp->state == IBV_QPS_ERR) {
            flush_receives(queue_pair);
        }
    }
    unlock();
    *bad = wr;
    return code;
}

/* ---- windows ---- */

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
    struct ibv_mw *window = calloc(1, sizeof(*window));
    if (window == NULL) {
        return fail(ENOMEM);
    }
    lock();
    window->rkey = new_key(false);
    if (window->rkey == 0) {
        unlock();
        free(window);
        return fail(ENOMEM);
    }
    window->context = pd->context;
    window->pd = pd;
    window->type = type;
    window->handle = window->rkey >> 8;
    pd->handle += 1;
    objects.windows += 1;
    unlock();
    return window;
}

static int dealloc_mw(struct ibv_mw *window)
{
    lock();
    unbind(&keys[window->handle]);
    keys[window->handle].key = 0;
    window->pd->handle -= 1;
    objects.windows -= 1;
    unlock();
    free(window);
    return 0;
}

/* ---- the device ---- */

static struct ibv_device device = {
    .node_type = IBV_NODE_CA,
    .transport_type = IBV_TRANSPORT_IB,
    .name = "null0",
    .dev_name = "null0",
};

struct ibv_device **ibv_get_device_list(int *count)
{
    struct ibv_device **list = calloc(2, sizeof(*list));
    if (list == NULL) {
        return fail(ENOMEM);
    }
    list[0] = &device;
    if (count != NULL) {
        *count = 1;
    }
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *of)
{
    return of->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *of)
{
    struct ibv_context *context = calloc(1, sizeof(*context));
    /* Never readable: nothing happens to this device. */
    int events = eventfd(0, EFD_CLOEXEC);
    if (context == NULL || events < 0) {
        free(context);
        return fail(ENOMEM);
    }
    context->device = of;
    context->async_fd = events;
    context->cmd_fd = -1;
    context->num_comp_vectors = 1;
    context->ops.alloc_mw = alloc_mw;
    context->ops.dealloc_mw = dealloc_mw;
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    lock();
    objects.contexts += 1;
    unlock();
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    lock();
    objects.contexts -= 1;
    unlock();
    close(context->async_fd);
    free(context);
    return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    (void)context;
    (void)event;
    errno = EAGAIN;
    return -1;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    (void)event;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes)
{
    (void)context;
    memset(attributes, 0, sizeof(*attributes));
    attributes->phys_port_cnt = 1;
    attributes->max_cqe = COMPLETIONS_MAX;
    attributes->max_qp = QUEUE_PAIRS_MAX;
    attributes->max_qp_wr = REQUESTS_MAX;
    attributes->max_sge = 1;
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *compat)
{
    struct ibv_port_attr *attributes = (struct ibv_port_attr *)compat;
    (void)context;
    if (port != 1) {
        return EINVAL;
    }
    /* Callers of this version know the fields before `port_cap_flags2`. */
    memset(attributes, 0, offsetof(struct ibv_port_attr, port_cap_flags2));
    attributes->state = IBV_PORT_ACTIVE;
    attributes->max_mtu = IBV_MTU_4096;
    attributes->active_mtu = IBV_MTU_4096;
    attributes->gid_tbl_len = 1;
    attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
                      struct ibv_gid_entry *entry, uint32_t flags, size_t bytes)
{
    /* 127.0.0.1, mapped. */
    static const uint8_t gid[16] = {[10] = 0xFF, [11] = 0xFF, [12] = 127, [15] = 1};
    (void)context;
    (void)flags;
    if (port != 1 || index != 0 || bytes != sizeof(*entry)) {
        return ENODATA;
    }
    memset(entry, 0, sizeof(*entry));
    memcpy(entry->gid.raw, gid, sizeof(gid));
    entry->port_num = port;
    entry->gid_type = IBV_GID_TYPE_ROCE_V2;
    return 0;
}

/* ---- domains, regions, channels, queues: `handle` counts what was made from a domain ---- */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *domain = calloc(1, sizeof(*domain));
    if (domain == NULL) {
        return fail(ENOMEM);
    }
    domain->context = context;
    lock();
    objects.domains += 1;
    unlock();
    return domain;
}

int ibv_dealloc_pd(struct ibv_pd *domain)
{
    lock();
    bool is_used = domain->handle > 0;
    objects.domains -= is_used ? 0 : 1;
    unlock();
    if (is_used) {
        return EBUSY;
    }
    free(domain);
    return 0;
}

static struct ibv_mr *register_memory(struct ibv_pd *domain, void *start, size_t bytes,
                                      unsigned int access)
{
    struct ibv_mr *region = calloc(1, sizeof(*region));
    if (region == NULL) {
        return fail(ENOMEM);
    }
    lock();
    region->rkey = new_key((access & IBV_ACCESS_REMOTE_WRITE) != 0);
    if (region->rkey == 0) {
        unlock();
        free(region);
        return fail(ENOMEM);
    }
    region->context = domain->context;
    region->pd = domain;
    region->addr = start;
    region->length = bytes;
    region->lkey = region->rkey;
    domain->handle += 1;
    objects.regions += 1;
    unlock();
    return region;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *domain, void *start, size_t bytes, uint64_t iova,
                                unsigned int access)
{
    (void)iova;
    return register_memory(domain, start, bytes, access);
}

/* Whatever the descriptor is of: no byte of it is ever looked for. */
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t bytes,
                                 uint64_t iova, int fd, int access)
{
    (void)offset;
    (void)iova;
    if (fcntl(fd, F_GETFD) < 0) {
        return NULL;
    }
    return register_memory(domain, NULL, bytes, (unsigned int)access);
}

int ibv_dereg_mr(struct ibv_mr *region)
{
    lock();
    keys[region->rkey >> 8].key = 0;
    region->pd->handle -= 1;
    objects.regions -= 1;
    unlock();
    free(region);
    return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct channel *channel = calloc(1, sizeof(*channel));
    int ends[2];
    if (channel == NULL || pipe2(ends, O_CLOEXEC) != 0) {
        free(channel);
        return fail(ENOMEM);
    }
    channel->channel.context = context;
    channel->channel.fd = ends[0];
    channel->in = ends[1];
    lock();
    objects.channels += 1;
    unlock();
    return &channel->channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    lock();
    bool is_used = channel->refcnt > 0;
    objects.channels -= is_used ? 0 : 1;
    unlock();
    if (is_used) {
        return EBUSY;
    }
    close(channel->fd);
    close(((struct channel *)channel)->in);
    free(channel);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **about)
{
    if (read(channel->fd, cq, sizeof(*cq)) != sizeof(*cq)) {
        return -1;
    }
    *about = (*cq)->cq_context;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
    (void)cq;
    (void)count;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *about,
                             struct ibv_comp_channel *channel, int vector)
{
    struct completion_queue *queue = calloc(1, sizeof(*queue));
    (void)vector;
    if (queue == NULL || entries < 1 || entries > COMPLETIONS_MAX) {
        free(queue);
        return fail(EINVAL);
    }
    queue->ring = calloc((size_t)entries, sizeof(*queue->ring));
    if (queue->ring == NULL) {
        free(queue);
        return fail(ENOMEM);
    }
    queue->capacity = (uint32_t)entries;
    queue->cq.context = context;
    queue->cq.channel = channel;
    queue->cq.cq_context = about;
    queue->cq.cqe = entries;
    lock();
    if (channel != NULL) {
        channel->refcnt += 1;
    }
    objects.queues += 1;
    unlock();
    return &queue->cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
    struct completion_queue *queue = (struct completion_queue *)cq;
    lock();
    bool is_used = queue->users > 0;
    if (!is_used) {
        objects.queues -= 1;
        if (cq->channel != NULL) {
            cq->channel->refcnt -= 1;
        }
    }
    unlock();
    if (is_used) {
        return EBUSY;
    }
    free(queue->ring);
    free(queue);
    return 0;
}

/* ---- queue pairs ---- */

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *attributes)
{
    const struct ibv_qp_cap *capacity = &attributes->cap;
    if (attributes->qp_type != IBV_QPT_RC || attributes->srq != NULL ||
        attributes->sq_sig_all != 0 || capacity->max_send_wr > REQUESTS_MAX ||
        capacity->max_recv_wr > REQUESTS_MAX || capacity->max_recv_wr == 0) {
        return fail(EINVAL);
    }
    struct queue_pair *queue_pair = calloc(1, sizeof(*queue_pair));
    uint64_t *receives = calloc(capacity->max_recv_wr, sizeof(*receives));
    lock();
    if (queue_pair == NULL || receives == NULL || next_number == QUEUE_PAIRS_MAX) {
        unlock();
        free(queue_pair);
        free(receives);
        return fail(ENOMEM);
    }
    queue_pair->qp.context = domain->context;
    queue_pair->qp.qp_context = attributes->qp_context;
    queue_pair->qp.pd = domain;
    queue_pair->qp.send_cq = attributes->send_cq;
    queue_pair->qp.recv_cq = attributes->recv_cq;
    queue_pair->qp.qp_type = attributes->qp_type;
    queue_pair->qp.state = IBV_QPS_RESET;
    queue_pair->qp.qp_num = next_number++;
    queue_pair->sends_max = capacity->max_send_wr;
    queue_pair->receives = receives;
    queue_pair->receives_max = capacity->max_recv_wr;
    queue_pairs[queue_pair->qp.qp_num] = queue_pair;
    domain->handle += 1;
    ((struct completion_queue *)attributes->send_cq)->users += 1;
    ((struct completion_queue *)attributes->recv_cq)->users += 1;
    objects.queue_pairs += 1;
    unlock();
    return &queue_pair->qp;
}

/* From which state a queue pair may go to `to`. */
static bool follows(enum ibv_qp_state from, enum ibv_qp_state to)
{
    switch (to) {
    case IBV_QPS_RESET:
    case IBV_QPS_ERR:
        return true;
    case IBV_QPS_INIT:
        return from == IBV_QPS_RESET;
    case IBV_QPS_RTR:
        return from == IBV_QPS_INIT;
    case IBV_QPS_RTS:
        return from == IBV_QPS_RTR;
    case IBV_QPS_SQD:
    case IBV_QPS_SQE:
    case IBV_QPS_UNKNOWN:
        return false;
    }
    return false;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask)
{
    struct queue_pair *queue_pair = (struct queue_pair *)qp;
    int code = 0;
    lock();
    if ((mask & IBV_QP_STATE) == 0 || !follows(qp->state, attributes->qp_state)) {
        code = EINVAL;
    } else if ((mask & IBV_QP_DEST_QPN) != 0 && attributes->dest_qp_num >= QUEUE_PAIRS_MAX) {
        code = EINVAL;
    } else {
        if ((mask & IBV_QP_DEST_QPN) != 0) {
            queue_pair->peer_number = attributes->dest_qp_num;
        }
        qp->state = attributes->qp_state;
        if (qp->state == IBV_QPS_ERR) {
            fault(queue_pair);
        }
    }
    unlock();
    return code;
}

static void forget_completions(struct completion_queue *queue, const struct queue_pair *queue_pair)
{
    for (uint32_t index = 0; index < queue->count; index++) {
        struct completion *completion = &queue->ring[(queue->first + index) % queue->capacity];
        if (completion->queue_pair == queue_pair) {
            completion->queue_pair = NULL;
        }
    }
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
    struct queue_pair *queue_pair = (struct queue_pair *)qp;
    lock();
    if (queue_pair->windows > 0) {
        unlock();
        return EBUSY;
    }
    struct queue_pair *peer = queue_pairs[queue_pair->peer_number];
    if (peer != NULL && peer->peer == queue_pair) {
        peer->peer = NULL;
    }
    queue_pairs[qp->qp_num] = NULL;
    forget_completions((struct completion_queue *)qp->send_cq, queue_pair);
    forget_completions((struct completion_queue *)qp->recv_cq, queue_pair);
    ((struct completion_queue *)qp->send_cq)->users -= 1;
    ((struct completion_queue *)qp->recv_cq)->users -= 1;
    qp->pd->handle -= 1;
    objects.queue_pairs -= 1;
    unlock();
    free(queue_pair->receives);
    free(queue_pair);
    return 0;
}

/* ---- the process ---- */

static __attribute__((constructor)) void begin(void)
{
    const char *most = getenv("NULL_VERBS_POLL_MAX");
    if (most != NULL) {
        poll_max = atoi(most);
        if (poll_max < 1) {
            abort();
        }
    }
}

static __attribute__((destructor)) void end(void)
{
    const char *path = getenv("NULL_VERBS_COUNTS");
    FILE *file = path != NULL ? fopen(path, "a") : NULL;
    if (file == NULL) {
        return;
    }
    fprintf(file,
            "doorbells=%lu writes=%lu bytes=%lu binds=%lu messages=%lu receives=%lu polls=%lu "
            "completions=%lu contexts_left=%ld domains_left=%ld channels_left=%ld queues_left=%ld "
            "queue_pairs_left=%ld regions_left=%ld windows_left=%ld\n",
            counts.doorbells, counts.writes, counts.bytes, counts.binds, counts.messages,
            counts.receives, counts.polls, counts.completions, objects.contexts, objects.domains,
            objects.channels, objects.queues, objects.queue_pairs, objects.regions,
            objects.windows);
    fclose(file);
}
