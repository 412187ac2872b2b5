/* Stands in for libcupti: replays records that a test writes down, into the buffers that whoever registered gives it.
 *
 * The fields lie at the places that the library has used since CUDA 11.8. Like the library it calls back from threads
 * of its own while a flush waits, hands buffers over when they are full or flushed, and records only kinds that are
 * enabled.
 */

#define _GNU_SOURCE

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { KIND, START, END, DEVICE, STREAM, CORRELATION, NAME, GRAPH_NODE, GRAPH, LENGTH, CELLS };
#define QUEUE 64
#define END_OF_BUFFER 12
#define INVALID_KIND 21

typedef struct {
    uint8_t *bytes;
    size_t size, used;
} Buffer;

static void (*request)(uint8_t **, size_t *, size_t *);
static void (*complete)(void *, uint32_t, uint8_t *, size_t, size_t);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Buffer queue[QUEUE], out[QUEUE];
static size_t queued, many_out;
static char calls[4096], failing[32];
static int failing_with, at_the_gate;
static bool holding, gate_closed, at_exit;
static atomic_uint enabled; /* a bit for each kind below 32 */
static atomic_ullong delivered, lost, faults;
static atomic_int misbehaviour;

/* ---- What the tests call ---- */

const char *mock_calls(void) { return calls; }
uint64_t mock_delivered(void) { return atomic_load(&delivered); } /* bytes of records */
uint64_t mock_faults(void) { return atomic_load(&faults); }       /* of whoever registered */

void mock_forget_calls(void)
{
    pthread_mutex_lock(&lock);
    calls[0] = 0;
    pthread_mutex_unlock(&lock);
}

/* Has the call that goes by this name in mock_calls() fail; "": none. */
void mock_fail(const char *call, int status)
{
    pthread_mutex_lock(&lock);
    snprintf(failing, sizeof failing, "%s", call);
    failing_with = status;
    pthread_mutex_unlock(&lock);
}

/* 1: gives the same record for ever; 2: gives one behind the end. */
void mock_misbehave(int how) { atomic_store(&misbehaviour, how); }

void mock_lose(uint64_t records) { atomic_fetch_add(&lost, records); }

static void hand_over(Buffer buffer)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < many_out; i++)
        if (out[i].bytes == buffer.bytes) {
            out[i] = out[--many_out];
            break;
        }
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&delivered, buffer.used);
    complete(NULL, 0, buffer.bytes, buffer.size, buffer.used);
}

static bool take_queued(Buffer *buffer)
{
    pthread_mutex_lock(&lock);
    bool found = queued > 0;
    if (found)
        *buffer = queue[--queued];
    pthread_mutex_unlock(&lock);
    return found;
}

/* Hands over whatever there is, even while buffers are held back. */
void mock_deliver(void)
{
    Buffer buffer;
    while (take_queued(&buffer))
        hand_over(buffer);
}

/* ... and does so once more at the very end, when libraries that came earlier have been left by the process. */
void mock_deliver_at_exit(void) { at_exit = true; }
__attribute__((destructor)) static void end(void)
{
    if (at_exit) {
        mock_deliver();
        printf("%llu bytes delivered\n", atomic_load(&delivered));
        fflush(stdout);
    }
}

/* Buffers are late: neither being full nor a flush has them handed over. */
void mock_hold(bool hold)
{
    pthread_mutex_lock(&lock);
    holding = hold;
    pthread_mutex_unlock(&lock);
}

/* A flush doesn't come back while the gate is closed; mock_waiting() says how many wait there. */
void mock_gate(bool closed)
{
    pthread_mutex_lock(&lock);
    gate_closed = closed;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int mock_waiting(void)
{
    pthread_mutex_lock(&lock);
    int waiting = at_the_gate;
    pthread_mutex_unlock(&lock);
    return waiting;
}

void mock_complete(uint8_t *buffer, size_t valid) { complete(NULL, 0, buffer, valid, valid); }

static bool requested(Buffer *buffer)
{
    size_t records = 1;
    *buffer = (Buffer){0};
    request(&buffer->bytes, &buffer->size, &records);
    if (!buffer->bytes)
        return false;
    pthread_mutex_lock(&lock);
    bool bad = (uintptr_t)buffer->bytes % 8 != 0 || buffer->size < 1024 || records != 0 || many_out == QUEUE;
    for (size_t i = 0; i < many_out; i++)
        bad |= buffer->bytes < out[i].bytes + out[i].size && out[i].bytes < buffer->bytes + buffer->size;
    if (bad)
        atomic_fetch_add(&faults, 1);
    else
        out[many_out++] = *buffer;
    pthread_mutex_unlock(&lock);
    return !bad;
}

static void enqueue(Buffer buffer)
{
    pthread_mutex_lock(&lock);
    queue[queued++] = buffer;
    pthread_mutex_unlock(&lock);
}

/* Asks for buffers until it gets none, and puts nothing in them; gives how many it got, and the address of one. */
uint32_t mock_hoard(uint64_t *address)
{
    uint32_t many = 0;
    for (Buffer buffer; requested(&buffer); many++) {
        *address = (uintptr_t)buffer.bytes;
        enqueue(buffer);
    }
    return many;
}

static size_t size_of(uint32_t kind)
{
    return kind == 10 ? 208 : kind == 1 ? 96 : kind == 2 ? 88 : 64;
}

static void put(uint8_t *record, size_t at, const void *value, size_t size) { memcpy(record + at, value, size); }

static void pack(uint8_t *into, const uint64_t *cells)
{
    uint8_t record[208];
    uint32_t kind = (uint32_t)cells[KIND], device = (uint32_t)cells[DEVICE], stream = (uint32_t)cells[STREAM],
             correlation = (uint32_t)cells[CORRELATION], graph = (uint32_t)cells[GRAPH];
    memset(record, 0xA5, sizeof record);
    put(record, 0, &kind, 4);
    put(record, 16, &cells[START], 8);
    put(record, 24, &cells[END], 8);
    if (kind == 10) {
        put(record, 40, &device, 4);
        put(record, 48, &stream, 4);
        put(record, 92, &correlation, 4);
        put(record, 104, &cells[NAME], 8);
        put(record, 144, &cells[GRAPH_NODE], 8);
        put(record, 156, &graph, 4);
    } else {
        if (kind == 1)
            record[4] = (uint8_t)cells[NAME]; /* which way it goes */
        put(record, 32, &device, 4);
        put(record, 40, &stream, 4);
        put(record, 44, &correlation, 4);
        put(record, 64, &cells[GRAPH_NODE], 8);
        put(record, 72, &graph, 4);
    }
    memcpy(into, record, cells[LENGTH] ? cells[LENGTH] : size_of(kind));
}

static void filled(Buffer *buffer)
{
    pthread_mutex_lock(&lock);
    bool keep = holding;
    pthread_mutex_unlock(&lock);
    if (keep)
        enqueue(*buffer);
    else
        hand_over(*buffer);
    buffer->bytes = NULL;
}

/* Replays `many` records, so many times: each as its cells say, and its buffer ends with it where a length is given. */
void mock_replay(const uint64_t *records, uint64_t many, uint64_t times)
{
    Buffer buffer = {0};
    for (uint64_t i = 0; i < many * times; i++) {
        const uint64_t *cells = records + CELLS * (i % many);
        uint64_t kind = cells[KIND];
        if ((kind == 1 || kind == 2 || kind == 10) && !(atomic_load(&enabled) >> kind & 1))
            continue;
        size_t size = size_of((uint32_t)kind);
        if (buffer.bytes && buffer.used + size > buffer.size)
            filled(&buffer);
        if (!buffer.bytes && !requested(&buffer)) {
            atomic_fetch_add(&lost, 1);
            continue;
        }
        pack(buffer.bytes + buffer.used, cells);
        buffer.used += cells[LENGTH] ? cells[LENGTH] : size;
        if (cells[LENGTH])
            filled(&buffer);
    }
    if (buffer.bytes)
        enqueue(buffer);
}

/* ---- What libcupti has ---- */

/* Notes the call; gives what it is to fail with. */
static int called(const char *call)
{
    pthread_mutex_lock(&lock);
    size_t length = strlen(calls);
    snprintf(calls + length, sizeof calls - length, "%s%s", length ? " " : "", call);
    int status = strcmp(failing, call) == 0 ? failing_with : 0;
    pthread_mutex_unlock(&lock);
    return status;
}

static int called_with(const char *call, uint32_t number)
{
    char text[64];
    snprintf(text, sizeof text, "%s(%u)", call, number);
    return called(text);
}

int cuptiActivityRegisterCallbacks(void (*asks)(uint8_t **, size_t *, size_t *),
                                   void (*takes)(void *, uint32_t, uint8_t *, size_t, size_t))
{
    int status = called("register");
    if (status == 0) {
        pthread_mutex_lock(&lock);
        if (!request) { /* unchanged by those who register again, and read without the lock */
            request = asks;
            complete = takes;
        }
        pthread_mutex_unlock(&lock);
    }
    return status;
}

int cuptiActivityEnable(uint32_t kind)
{
    int status = called_with("enable", kind);
    if (status == 0)
        atomic_fetch_or(&enabled, 1u << kind);
    return status;
}

int cuptiActivityDisable(uint32_t kind)
{
    int status = called_with("disable", kind);
    if (status == 0)
        atomic_fetch_and(&enabled, ~(1u << kind));
    return status;
}

static void *deliver(void *unused)
{
    mock_deliver();
    return unused;
}

int cuptiActivityFlushAll(uint32_t flag)
{
    int status = called_with("flush", flag);
    pthread_mutex_lock(&lock);
    bool deliver_now = !holding && status == 0;
    at_the_gate++;
    while (gate_closed)
        pthread_cond_wait(&changed, &lock);
    at_the_gate--;
    pthread_mutex_unlock(&lock);
    pthread_t worker;
    if (deliver_now && pthread_create(&worker, NULL, deliver, NULL) == 0)
        pthread_join(worker, NULL);
    return status;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **record)
{
    uint32_t kind = 0;
    size_t at = 0;
    if (*record && atomic_load(&misbehaviour) == 1)
        return 0;
    if (*record) {
        memcpy(&kind, *record, sizeof kind);
        at = (size_t)(*record - buffer) + size_of(kind);
    }
    if (at >= valid)
        return END_OF_BUFFER;
    memcpy(&kind, buffer + at, sizeof kind);
    if (kind == 0)
        return INVALID_KIND;
    *record = atomic_load(&misbehaviour) == 2 ? buffer + valid : buffer + at;
    return 0;
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped)
{
    (void)context, (void)stream;
    *dropped = atomic_exchange(&lost, 0);
    return 0;
}

#ifdef AHEAD /* seconds that the library's clock is ahead of the host's */
int cuptiGetTimestamp(uint64_t *timestamp)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    *timestamp = (uint64_t)(time.tv_sec + AHEAD) * 1000000000u + (uint64_t)time.tv_nsec;
    return 0;
}
#endif
