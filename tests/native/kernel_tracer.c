/* A small native tracer: each kernel becomes a span below the parent that was handed over, and is sent to the Agent at
 * $KERNEL_TRACER_AGENT (host:port, an address) when the parent is taken back, and at the end. What the GPU runs is heard
 * from CUPTI, where the process has it by the first parent; on a CPU something may call itself a kernel.
 */

#define _GNU_SOURCE

#include <arpa/inet.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ROOM (1 << 20)
#define TAGS 2048

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static struct {
    bool is_there;
    uint64_t trace_lo, trace_hi, span;
    int priority;
    char service[256], tags[TAGS];
} parent;
static char spans[ROOM];
static size_t used, many;

static void send_all(const char *address)
{
    char host[64], head[512];
    const char *colon = strchr(address, ':');
    struct sockaddr_in there = {.sin_family = AF_INET};
    snprintf(host, sizeof host, "%.*s", colon ? (int)(colon - address) : 0, address);
    if (!colon || inet_pton(AF_INET, host, &there.sin_addr) != 1)
        return;
    there.sin_port = htons((uint16_t)atoi(colon + 1));
    int to = socket(AF_INET, SOCK_STREAM, 0);
    size_t length = (size_t)snprintf(head, sizeof head,
                                     "PUT /v0.4/traces HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n"
                                     "Content-Type: application/json\r\nContent-Length: %zu\r\n"
                                     "X-Datadog-Trace-Count: %zu\r\nDatadog-Meta-Tracer-Version: 1\r\n\r\n",
                                     address, used + 2, many);
    if (connect(to, (struct sockaddr *)&there, sizeof there) == 0 && write(to, head, length) == (ssize_t)length &&
        write(to, "[", 1) == 1 && write(to, spans, used) == (ssize_t)used && write(to, "]", 1) == 1)
        while (read(to, head, sizeof head) > 0)
            ;
    close(to);
}

static void flush(void)
{
    const char *address = getenv("KERNEL_TRACER_AGENT");
    if (many && address)
        send_all(address);
    used = many = 0;
}

/* What ran from `start` on for so long, in ns since the epoch, on a stream (-1: on none). */
static void add(const char *name, uint64_t start, uint64_t duration, int64_t stream)
{
    static uint64_t numbers;
    char one[TAGS + 2048];
    pthread_mutex_lock(&one_at_a_time);
    if (parent.is_there) {
        uint64_t id = ((uint64_t)getpid() << 32) + ++numbers;
        size_t length = (size_t)snprintf(
            one, sizeof one,
            "%s[{\"trace_id\":%" PRIu64 ",\"span_id\":%" PRIu64 ",\"parent_id\":%" PRIu64 ",\"name\":\"kernel\","
            "\"resource\":\"%.1000s\",\"service\":\"%s\",\"type\":\"gpu\",\"start\":%" PRIu64 ",\"duration\":%" PRIu64
            ",\"error\":0,\"meta\":{\"_dd.p.tid\":\"%016" PRIx64
            "\"%s},\"metrics\":{\"_sampling_priority_v1\":%d,\"stream\":%" PRId64 "}}]",
            many ? "," : "", parent.trace_lo, id, parent.span, name, parent.service, start, duration, parent.trace_hi,
            parent.tags, parent.priority, stream);
        if (length < sizeof one && used + length < ROOM) {
            memcpy(spans + used, one, length);
            used += length;
            many++;
        }
    }
    pthread_mutex_unlock(&one_at_a_time);
}

void kernel(const char *name, uint64_t start, uint64_t duration) { add(name, start, duration, -1); }

/* Of CUPTI's activity API: where the fields of a kernel's record lie has been the same in all of its versions since CUDA
 * 11.8, and its times are ns since the epoch. A call that gives anything but 0 did nothing. */
#define CONCURRENT_KERNEL 10
#define BUFFER (1 << 20)

static struct {
    int (*register_callbacks)(void (*)(uint8_t **, size_t *, size_t *),
                              void (*)(void *, uint32_t, uint8_t *, size_t, size_t));
    int (*enable)(int);
    int (*next)(uint8_t *, size_t, uint8_t **);
    int (*flush_all)(uint32_t);
} cupti;

static void give_buffer(uint8_t **buffer, size_t *size, size_t *records)
{
    *buffer = aligned_alloc(8, BUFFER);
    *size = *buffer ? BUFFER : 0;
    *records = 0;
}

static void take_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    uint8_t *record = NULL;
    while (buffer && cupti.next(buffer, valid, &record) == 0) {
        uint32_t kind, on;
        uint64_t start, end;
        const char *name;
        memcpy(&kind, record, sizeof kind);
        memcpy(&start, record + 16, sizeof start);
        memcpy(&end, record + 24, sizeof end);
        memcpy(&on, record + 48, sizeof on);
        memcpy(&name, record + 104, sizeof name);
        if (kind == CONCURRENT_KERNEL && name && start && end >= start)
            add(name, start, end - start, on);
    }
    free(buffer);
}

static void listen_to_gpu(void)
{
    static const char *const names[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so.11"};
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof names / sizeof *names; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return;
    *(void **)&cupti.register_callbacks = dlsym(library, "cuptiActivityRegisterCallbacks");
    *(void **)&cupti.enable = dlsym(library, "cuptiActivityEnable");
    *(void **)&cupti.next = dlsym(library, "cuptiActivityGetNextRecord");
    *(void **)&cupti.flush_all = dlsym(library, "cuptiActivityFlushAll");
    if (!cupti.register_callbacks || !cupti.enable || !cupti.next ||
        cupti.register_callbacks(give_buffer, take_buffer) || cupti.enable(CONCURRENT_KERNEL))
        cupti.flush_all = NULL;
}

/* Not with the lock held, which whoever takes the buffers needs. */
static void hear_the_last(void)
{
    if (cupti.flush_all)
        cupti.flush_all(1);
}

void dd_set_global_parent_context(uint64_t trace_id_lo, uint64_t trace_id_hi, uint64_t span_id,
                                  bool has_sampling_priority, int sampling_priority,
                                  const char *const *keys, const char *const *values, size_t count)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, listen_to_gpu);
    hear_the_last(); /* what ran until now is the former one's */
    pthread_mutex_lock(&one_at_a_time);
    parent.is_there = true;
    parent.trace_lo = trace_id_lo;
    parent.trace_hi = trace_id_hi;
    parent.span = span_id;
    parent.priority = has_sampling_priority ? sampling_priority : 1;
    parent.tags[0] = parent.service[0] = 0;
    for (size_t i = 0, at = 0; i < count; i++) {
        at += (size_t)snprintf(parent.tags + at, TAGS - at, ",\"%s\":\"%s\"", keys[i], values[i]);
        if (strcmp(keys[i], "service") == 0)
            snprintf(parent.service, sizeof parent.service, "%s", values[i]);
    }
    pthread_mutex_unlock(&one_at_a_time);
}

void dd_clear_global_parent_context(void)
{
    hear_the_last();
    pthread_mutex_lock(&one_at_a_time);
    parent.is_there = false;
    flush();
    pthread_mutex_unlock(&one_at_a_time);
}

/* The parent process sends what it has itself. */
static void in_child(void)
{
    pthread_mutex_init(&one_at_a_time, NULL);
    used = many = 0;
    cupti.flush_all = NULL;
}

__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, in_child); }
__attribute__((destructor)) static void end(void) { flush(); }
