/* What the GPU spends its time in: counts the records of CUPTI's activity API, by kernel and stream.
 *
 * It has the four dd_* functions of Datadog's native tracer, too: what is told that one of steps and of the open span is
 * told this one where that one isn't there. It is loaded with RTLD_LOCAL, so its dd_* hide nobody's.
 *
 * A plain shared library, to be loaded with ctypes; it knows neither Python nor CUDA's headers. Nothing here runs
 * Python, so nothing waits for the interpreter's lock on the threads that CUPTI calls from.
 *
 * Who may wait for whom:
 *   control   one call that switches at a time; held while CUPTI is called. CUPTI's callbacks don't take it, for
 *             a flush waits for them.
 *   counting  held while a buffer's records are counted, and by ks_take() for as long as two pointers take to change.
 *   taking    one ks_take() at a time; not needed to switch, so a step never waits for a copy.
 *   telling   held for as long as a copy of the parent, or of an error, takes; no other is taken under it.
 * Asking for a buffer takes no lock: CUPTI does that on the thread that launches a kernel. Nor does a step's beginning or
 * end, but where it switches: then it waits for a switch or a flush that is under way.
 *
 * A forked child has copies of locks that nobody will open. There every call gives FORKED and takes none.
 *
 * There is no destructor, and none of CUPTI's functions is called at exit: by then its own may have run. Whatever CUPTI
 * still delivers then, or after ks_off(), is counted as late and not read. The buffers are static: they outlive all.
 *
 * Whoever changes what a caller sees changes INTERFACE.
 */

#define _GNU_SOURCE

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define INTERFACE 2

#define EXPORT __attribute__((visibility("default")))

#define BUFFER (1u << 20) /* bytes */
#define BUFFERS 16u       /* at most 32, for each is a bit */
#define ROWS 2048u
#define NAMES 2048u
#define NAME_BYTES (512u << 10)
#define NAME_AT_MOST 4095u /* bytes; of a longer name the beginning counts */
#define RAWS 200000u
#define RAWS_AT_HAND 16384u /* the memory of more is given back each time */
#define BUCKETS 64u /* as in ddtrace_pytorch.histogram */
#define SLOTS 4096u /* of a hash table: a power of two, and twice what is in it */
#define RECENT 4096u
#define NONE UINT32_MAX
#define TAGS 16u
#define TAG_NAME 64u /* bytes, the last of them zero; of what is longer the beginning is kept */
#define TAG_VALUE 256u

/* How far a record may lie before the start or after the present, in ns: what clocks of GPU and host may differ by. */
#define SLACK UINT64_C(1000000000)

enum { OK, ARGUMENT, NO_LIBRARY, NO_FUNCTION, NOT_OPEN, REFUSED, FORKED };

/* CUPTI's own numbers. */
enum { MEMCPY = 1, MEMSET = 2, CONCURRENT_KERNEL = 10 };
enum { END_OF_BUFFER = 12 };
enum { FLUSH_FINISHED = 0, FLUSH_FORCED = 1 };

/* Why a record isn't counted. */
enum {
    UNKNOWN_KIND,
    CUT_SHORT,     /* its buffer ends before it does */
    UNTIMED,       /* it had not ended when it was flushed, or CUPTI had no memory for its times */
    BACKWARDS,     /* it ended before it began */
    OUT_OF_WINDOW, /* it began before ks_on() or ended after now */
    NAMELESS,
    UNREADABLE, /* of a buffer: CUPTI says that the rest isn't records */
    OUTSIDE,    /* of a buffer: CUPTI's next record isn't in it */
    REASONS
};

/* All that ran under one name on one stream. Times in ns; bucket b counts those of less than 2**b and at least half. */
typedef struct {
    uint32_t name, kind, device, stream;
    uint64_t count, total, longest;
    uint64_t buckets[BUCKETS];
} Row;

typedef struct {
    uint64_t start, end, graph_node;
    uint32_t name, kind, device, stream, correlation, graph;
} Raw;

typedef struct {
    uint64_t records, buffers, rows, names, name_bytes, raws;
    uint64_t raws_left_out;                     /* records, while raws were asked for */
    uint64_t rows_full, names_full, names_cut;  /* records, records, names */
    uint64_t dropped[REASONS];
    uint64_t cupti_dropped, late_buffers, late_bytes, strays, refusals;
    uint64_t held;  /* buffers that CUPTI has, now */
    uint64_t steps; /* that began with it on since ks_arm() asked for that */
} Totals;

typedef struct {
    char name[TAG_NAME], value[TAG_VALUE];
} Tag;

/* Whom what the GPU does belongs to, as it was handed over last. */
typedef struct {
    uint64_t trace_lo, trace_hi, span;
    uint32_t has_priority;
    int32_t priority;
    uint64_t many, left_out; /* tags */
    Tag tags[TAGS];
} Context;

static struct {
    int (*register_callbacks)(void (*)(uint8_t **, size_t *, size_t *),
                              void (*)(void *, uint32_t, uint8_t *, size_t, size_t));
    int (*enable)(uint32_t);
    int (*disable)(uint32_t);
    int (*flush)(uint32_t);
    int (*next)(uint8_t *, size_t, uint8_t **);
    int (*dropped)(void *, uint32_t, size_t *);
    int (*timestamp)(uint64_t *); /* may be NULL */
} cupti;

static pthread_mutex_t control = PTHREAD_MUTEX_INITIALIZER, counting = PTHREAD_MUTEX_INITIALIZER,
                       taking = PTHREAD_MUTEX_INITIALIZER, telling = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool forked;

static void in_child(void) { atomic_store(&forked, true); }

/* As it is loaded: a parent may be handed over, and a child forked, before anything is opened. */
__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, in_child); }

/* What was wrong with the last call of this thread. */
static _Thread_local char error[512];

__attribute__((format(printf, 2, 3))) static int fail(int code, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(error, sizeof error, format, values);
    va_end(values);
    return code;
}

static int fail_forked(void) { return fail(FORKED, "off in a forked child"); }
static int fail_flags(uint32_t flags) { return fail(ARGUMENT, "flags of 0 to 3, not %u", flags); }

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* ---- What is counted ---- */

typedef struct {
    uint32_t hash, at, length;
} Name;

typedef struct {
    const char *text;
    uint32_t name;
} Recent;

/* First come, first served: what finds no room is counted in row 0. The names lie one after the other, each with a zero
 * at its end. */
typedef struct {
    Totals totals;
    Row rows[1 + ROWS];
    Raw raws[RAWS];
    Name names[NAMES];
    char bytes[NAME_BYTES];
    uint16_t row_slots[SLOTS], name_slots[SLOTS]; /* 0, or a number and 1 */
    Recent recent[RECENT];
} Table;

_Static_assert(2 * ROWS <= SLOTS && 2 * NAMES <= SLOTS && SLOTS <= UINT16_MAX, "tables that are never full");

static Table tables[2];
static Table *active; /* under `counting`; NULL before the first ks_open() */
static atomic_uint raws_wanted;

/* The whole pages of what more than the usual number of raw records have taken. */
static void give_back(Table *table)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)(table->raws + RAWS_AT_HAND) + page - 1) / page * page;
    uintptr_t to = (uintptr_t)(table->raws + table->totals.raws) / page * page;
    if (from < to)
        madvise((void *)from, to - from, MADV_DONTNEED);
}

static void reset(Table *table)
{
    give_back(table);
    memset(&table->totals, 0, sizeof table->totals);
    memset(table->row_slots, 0, sizeof table->row_slots);
    memset(table->name_slots, 0, sizeof table->name_slots);
    memset(table->recent, 0, sizeof table->recent);
    table->rows[0] = (Row){.name = NONE, .device = NONE, .stream = NONE};
    table->totals.rows = 1;
}

static uint32_t mixed(uint64_t value) { return (uint32_t)((value * UINT64_C(0x9E3779B97F4A7C15)) >> 32); }

static uint32_t hash_of(const char *text, size_t length)
{
    uint64_t hash = length;
    for (size_t at = 0; at < length; at += sizeof hash) {
        uint64_t word = 0;
        memcpy(&word, text + at, length - at < sizeof word ? length - at : sizeof word);
        hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 32;
    }
    return mixed(hash);
}

/* The number of a name, by what it says. One at a place seen before is compared, not hashed; never just believed, for
 * CUPTI may put another there. */
static uint32_t name_of(Table *table, const char *text)
{
    Totals *totals = &table->totals;
    Recent *recent = &table->recent[mixed((uintptr_t)text) % RECENT];
    if (recent->text == text && strcmp(text, table->bytes + table->names[recent->name].at) == 0)
        return recent->name;
    uint32_t length = (uint32_t)strnlen(text, NAME_AT_MOST), hash = hash_of(text, length), slot = hash % SLOTS;
    for (; table->name_slots[slot]; slot = (slot + 1) % SLOTS) {
        uint32_t number = table->name_slots[slot] - 1u;
        const Name *name = &table->names[number];
        if (name->hash == hash && name->length == length && memcmp(table->bytes + name->at, text, length) == 0) {
            *recent = (Recent){text, number};
            return number;
        }
    }
    if (totals->names == NAMES || totals->name_bytes + length + 1 > NAME_BYTES) {
        totals->names_full++;
        return NONE;
    }
    uint32_t number = (uint32_t)totals->names++;
    table->names[number] = (Name){hash, (uint32_t)totals->name_bytes, length};
    memcpy(table->bytes + totals->name_bytes, text, length);
    table->bytes[totals->name_bytes + length] = 0;
    totals->name_bytes += length + 1;
    totals->names_cut += text[length] != 0;
    table->name_slots[slot] = (uint16_t)(number + 1);
    *recent = (Recent){text, number};
    return number;
}

static Row *row_of(Table *table, const Raw *raw)
{
    if (raw->name == NONE)
        return &table->rows[0];
    uint64_t where = ((uint64_t)raw->device << 24) ^ raw->stream, what = (raw->name << 4) ^ raw->kind;
    uint32_t slot = mixed(what << 36 ^ where) % SLOTS;
    for (; table->row_slots[slot]; slot = (slot + 1) % SLOTS) {
        Row *row = &table->rows[table->row_slots[slot] - 1];
        if (row->name == raw->name && row->stream == raw->stream && row->device == raw->device &&
            row->kind == raw->kind)
            return row;
    }
    if (table->totals.rows == 1 + ROWS) {
        table->totals.rows_full++;
        return &table->rows[0];
    }
    Row *row = &table->rows[table->totals.rows++];
    *row = (Row){raw->name, raw->kind, raw->device, raw->stream, 0, 0, 0, {0}};
    table->row_slots[slot] = (uint16_t)(row - table->rows + 1);
    return row;
}

static void count(Table *table, const Raw *raw)
{
    uint64_t took = raw->end - raw->start;
    Row *row = row_of(table, raw);
    row->count++;
    row->total += took;
    if (took > row->longest)
        row->longest = took;
    row->buckets[took ? 64 - __builtin_clzll(took) : 0]++;
    Totals *totals = &table->totals;
    totals->records++;
    uint32_t wanted = atomic_load_explicit(&raws_wanted, memory_order_relaxed);
    if (totals->raws < wanted)
        table->raws[totals->raws++] = *raw;
    else
        totals->raws_left_out += wanted > 0;
}

/* ---- A record, by the places of its fields: they have been the same since CUDA 11.8 ---- */

typedef struct {
    size_t device, stream, correlation, graph_node, graph, size;
} Layout;

static const Layout of_kernel = {40, 48, 92, 144, 156, 160}, of_memory = {32, 40, 44, 64, 72, 76};
enum { KIND_AT = 0, DIRECTION_AT = 4, START_AT = 16, END_AT = 24, NAME_AT = 104 };

static uint32_t u32(const uint8_t *record, size_t at)
{
    uint32_t value;
    memcpy(&value, record + at, sizeof value);
    return value;
}

static uint64_t u64(const uint8_t *record, size_t at)
{
    uint64_t value;
    memcpy(&value, record + at, sizeof value);
    return value;
}

static const char *text_of(const uint8_t *record, uint32_t kind)
{
    static const char *const directions[] = {"memcpy",      "memcpy HtoD", "memcpy DtoH", "memcpy HtoA",
                                             "memcpy AtoH", "memcpy AtoA", "memcpy AtoD", "memcpy DtoA",
                                             "memcpy DtoD", "memcpy HtoH", "memcpy PtoP"};
    if (kind == MEMSET)
        return "memset";
    if (kind == MEMCPY)
        return directions[record[DIRECTION_AT] < sizeof directions / sizeof *directions ? record[DIRECTION_AT] : 0];
    const char *text;
    memcpy(&text, record + NAME_AT, sizeof text);
    return text;
}

/* Counts the record of which `left` bytes are there; its times have to be within `from` and `until`. */
static void read_record(Table *table, const uint8_t *record, size_t left, uint64_t from, uint64_t until)
{
    uint64_t *dropped = table->totals.dropped;
    if (left < sizeof(uint32_t)) {
        dropped[CUT_SHORT]++;
        return;
    }
    uint32_t kind = u32(record, KIND_AT);
    if (kind != CONCURRENT_KERNEL && kind != MEMCPY && kind != MEMSET) {
        dropped[UNKNOWN_KIND]++;
        return;
    }
    const Layout *layout = kind == CONCURRENT_KERNEL ? &of_kernel : &of_memory;
    if (left < layout->size) {
        dropped[CUT_SHORT]++;
        return;
    }
    uint64_t start = u64(record, START_AT), end = u64(record, END_AT);
    const char *text = text_of(record, kind);
    if (!start || !end)
        dropped[UNTIMED]++;
    else if (end < start)
        dropped[BACKWARDS]++;
    else if (start < from || end > until)
        dropped[OUT_OF_WINDOW]++;
    else if (!text)
        dropped[NAMELESS]++;
    else {
        Raw raw = {start,
                   end,
                   u64(record, layout->graph_node),
                   name_of(table, text),
                   kind,
                   u32(record, layout->device),
                   u32(record, layout->stream),
                   u32(record, layout->correlation),
                   u32(record, layout->graph)};
        count(table, &raw);
    }
}

/* ---- What CUPTI calls ---- */

static _Alignas(4096) uint8_t pool[BUFFERS][BUFFER];
/* A bit for each buffer: in `spare`, or in `held`, or in neither while it is read. */
static atomic_uint spare = (1u << BUFFERS) - 1, held;
static atomic_ullong late_buffers, late_bytes, strays, refusals, cupti_dropped;
static atomic_bool listening;
/* The times of records: from when on they count, and what CUPTI's clock is ahead of the host's. */
static atomic_ullong earliest;
static atomic_llong ahead;

static void buffer_requested(uint8_t **buffer, size_t *size, size_t *records)
{
    *buffer = NULL;
    *size = *records = 0;
    if (atomic_load(&forked))
        return;
    unsigned spares = atomic_load(&spare);
    while (spares && atomic_load(&listening)) {
        unsigned bit = spares & -spares;
        if (!atomic_compare_exchange_weak(&spare, &spares, spares & ~bit))
            continue;
        atomic_fetch_or(&held, bit);
        *buffer = pool[__builtin_ctz(bit)];
        *size = BUFFER;
        return;
    }
    atomic_fetch_add(&refusals, 1);
}

static void read_buffer(Table *table, uint8_t *buffer, size_t valid)
{
    uint64_t from = atomic_load(&earliest), until = now() + (uint64_t)atomic_load(&ahead) + SLACK;
    uint8_t *record = NULL;
    size_t least = 0;
    int status;
    table->totals.buffers++;
    while ((status = cupti.next(buffer, valid, &record)) == 0) {
        size_t at = (uintptr_t)record - (uintptr_t)buffer;
        if (at < least || at >= valid) {
            table->totals.dropped[OUTSIDE]++;
            return;
        }
        read_record(table, record, valid - at, from, until);
        least = at + 1;
    }
    if (status != END_OF_BUFFER)
        table->totals.dropped[UNREADABLE]++;
}

static void buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    (void)context, (void)stream, (void)size;
    if (atomic_load(&forked))
        return;
    size_t at = (uintptr_t)buffer - (uintptr_t)pool;
    unsigned bit = at < sizeof pool && at % BUFFER == 0 ? 1u << (at / BUFFER) : 0;
    if (!(atomic_fetch_and(&held, ~bit) & bit)) {
        atomic_fetch_add(&strays, 1);
        return;
    }
    if (valid > BUFFER)
        valid = BUFFER;
    if (atomic_load(&listening)) {
        size_t dropped = 0;
        if (cupti.dropped(NULL, 0, &dropped) == 0)
            atomic_fetch_add(&cupti_dropped, dropped);
        pthread_mutex_lock(&counting);
        read_buffer(active, buffer, valid);
        pthread_mutex_unlock(&counting);
    } else {
        atomic_fetch_add(&late_buffers, 1);
        atomic_fetch_add(&late_bytes, valid);
    }
    atomic_fetch_or(&spare, bit);
}

/* ---- What the caller calls. All give OK, or what is wrong; ks_error() then says it in words. ---- */

static atomic_bool is_open; /* changed under `control` */
static unsigned enabled; /* bits of `kinds` */
static const uint32_t kinds[] = {CONCURRENT_KERNEL, MEMCPY, MEMSET};

/* For steps: what the next one is to be switched on with, 0: not at all; and what this one was. Changed under `control`
 * but by ks_arm(), and read without. */
static atomic_uint armed, stepping;
static atomic_ullong steps;
/* What was wrong with the last switch of a step that gave anything but OK; under `telling`. */
static int step_result;
static char step_error[sizeof error];

EXPORT uint32_t ks_interface(void) { return INTERFACE; }

/* What was wrong with this thread's last call that gave anything but OK; to be read before its next one. */
EXPORT const char *ks_error(void) { return error; }

/* Fills in the first `room` of: the bytes of a row, of a raw record and of the totals, the number of rows, names' bytes
 * and raw records that ks_take() wants room for, buckets of a row, reasons, names, bytes of a name, buffers, a buffer's
 * bytes, the bytes of a context, its tags, and the bytes of a tag's name and value. Gives how many there are. */
EXPORT uint32_t ks_limits(uint32_t *into, uint32_t room)
{
    static const uint32_t limits[] = {sizeof(Row), sizeof(Raw), sizeof(Totals), 1 + ROWS, NAME_BYTES, RAWS,
                                      BUCKETS,     REASONS,     NAMES,          NAME_AT_MOST, BUFFERS, BUFFER,
                                      sizeof(Context), TAGS,    TAG_NAME,       TAG_VALUE};
    const uint32_t many = sizeof limits / sizeof *limits;
    for (uint32_t i = 0; i < room && i < many; i++)
        into[i] = limits[i];
    return many;
}

static int resolve(void *library)
{
    const struct {
        const char *name;
        void *into;
        bool needed;
    } functions[] = {
        {"cuptiActivityRegisterCallbacks", &cupti.register_callbacks, true},
        {"cuptiActivityEnable", &cupti.enable, true},
        {"cuptiActivityDisable", &cupti.disable, true},
        {"cuptiActivityFlushAll", &cupti.flush, true},
        {"cuptiActivityGetNextRecord", &cupti.next, true},
        {"cuptiActivityGetNumDroppedRecords", &cupti.dropped, true},
        {"cuptiGetTimestamp", &cupti.timestamp, false},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(library, functions[i].name);
        if (!found && functions[i].needed)
            return fail(NO_FUNCTION, "no %s in CUPTI's library", functions[i].name);
        memcpy(functions[i].into, &found, sizeof found);
    }
    return OK;
}

static int open_library(const char *name)
{
    void *library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (!library)
        library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        return fail(NO_LIBRARY, "%s", why ? why : name);
    }
    int result = resolve(library);
    if (result) {
        dlclose(library);
        return result;
    }
    if (!active) {
        reset(&tables[0]);
        reset(&tables[1]);
        active = &tables[0];
    }
    atomic_store(&is_open, true);
    return OK;
}

/* Finds CUPTI's functions, in the library of this name that the process has, else in one that is loaded now. Once they
 * are found, it is open for good. */
EXPORT int ks_open(const char *libcupti)
{
    if (atomic_load(&forked))
        return fail_forked();
    if (!libcupti)
        return fail(ARGUMENT, "no name of CUPTI's library");
    pthread_mutex_lock(&control);
    int result = atomic_load(&is_open) ? OK : open_library(libcupti);
    pthread_mutex_unlock(&control);
    return result;
}

static int checked(const char *function, int status)
{
    return status ? fail(REFUSED, "%s gave %d", function, status) : OK;
}

/* Has these kinds be recorded, and no others. One that can't be switched off counts as off: there is no more to do. */
static int record(unsigned wanted)
{
    int result = OK;
    for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        unsigned bit = 1u << i;
        if (enabled & ~wanted & bit) {
            int failed = checked("cuptiActivityDisable", cupti.disable(kinds[i]));
            result = result ? result : failed;
            enabled &= ~bit;
        } else if (wanted & ~enabled & bit) {
            int failed = checked("cuptiActivityEnable", cupti.enable(kinds[i]));
            if (failed)
                return failed;
            enabled |= bit;
        }
    }
    return result;
}

static int stop(void)
{
    int result = record(0);
    int failed = checked("cuptiActivityFlushAll", cupti.flush(FLUSH_FORCED));
    atomic_store(&listening, false);
    return result ? result : failed;
}

static int start(unsigned wanted)
{
    if (!atomic_load(&listening)) {
        uint64_t here = now(), there = 0;
        if (!cupti.timestamp || cupti.timestamp(&there) || !there)
            there = here;
        atomic_store(&ahead, (long long)(there - here));
        atomic_store(&earliest, there > SLACK ? there - SLACK : 0);
        int failed = checked("cuptiActivityRegisterCallbacks",
                             cupti.register_callbacks(buffer_requested, buffer_completed));
        if (failed)
            return failed;
        atomic_store(&listening, true);
    }
    int result = record(wanted);
    if (result) {
        char why[sizeof error];
        memcpy(why, error, sizeof why);
        stop();
        memcpy(error, why, sizeof why);
    }
    return result;
}

static int fail_unless_usable(void)
{
    if (atomic_load(&forked))
        return fail_forked();
    return atomic_load(&is_open) ? OK : fail(NOT_OPEN, "CUPTI's library isn't open");
}

static int switched(int (*act)(unsigned), unsigned argument)
{
    int result = fail_unless_usable();
    if (result)
        return result;
    pthread_mutex_lock(&control);
    result = act(argument);
    pthread_mutex_unlock(&control);
    return result;
}

/* Nothing comes on by itself after this: neither with a step, nor goes on over the end of one. */
static void disarm(void)
{
    atomic_store(&armed, 0);
    atomic_store(&stepping, 0);
}

static int on(unsigned wanted)
{
    atomic_store(&stepping, 0);
    return start(wanted);
}

static int pause_(unsigned unused)
{
    (void)unused;
    disarm();
    return record(0);
}

static int off(unsigned unused)
{
    (void)unused;
    disarm();
    return atomic_load(&listening) ? stop() : OK;
}

static int flush(unsigned unused)
{
    (void)unused;
    return atomic_load(&listening) ? checked("cuptiActivityFlushAll", cupti.flush(FLUSH_FINISHED)) : OK;
}

/* Records kernels that are launched from now on; and copies (flag 1), and fills of memory (flag 2). On again with other
 * flags: those count from now on. Where it fails, it is off. */
EXPORT int ks_on(uint32_t flags)
{
    return flags > 3 ? fail_flags(flags) : switched(on, 1 | flags << 1);
}

/* Records nothing that is launched from now on, while what was launched before still counts when it ends. Before
 * ks_off(), which loses what the GPU hasn't done yet: it lags behind the host by up to a step. This and ks_off() take
 * back what ks_arm() asked for. */
EXPORT int ks_pause(void) { return switched(pause_, 0); }

/* Has CUPTI hand over what has ended; it does so by itself only when a buffer is full. A switch waits for it. */
EXPORT int ks_flush(void) { return switched(flush, 0); }

/* Records nothing any more, has CUPTI hand over everything, and hears nothing afterwards. */
EXPORT int ks_off(void) { return switched(off, 0); }

/* Has the next step be recorded, with flags as for ks_on(): from dd_training_step_begin() to the dd_training_step_end()
 * after it, which pauses. Where this is called again before that end, it stays on over the border of the two. */
EXPORT int ks_arm(uint32_t flags)
{
    int result = flags > 3 ? fail_flags(flags) : fail_unless_usable();
    if (result == OK)
        atomic_store(&armed, 1 | flags << 1);
    return result;
}

/* Gives what the last switch of a step gave that failed since this was called last, with its words in `into`; else OK,
 * and no words. */
EXPORT int ks_step_error(char *into, uint32_t room)
{
    if (atomic_load(&forked))
        return fail_forked();
    pthread_mutex_lock(&telling);
    int result = step_result;
    snprintf(into, room, "%s", step_error);
    step_result = OK;
    step_error[0] = 0;
    pthread_mutex_unlock(&telling);
    return result;
}

/* Keeps the first `many` records as they are, of those that ks_take() will take next; 0: none. */
EXPORT int ks_keep(uint32_t many)
{
    if (atomic_load(&forked))
        return fail_forked();
    if (many > RAWS)
        return fail(ARGUMENT, "at most %u raw records", RAWS);
    atomic_store(&raws_wanted, many);
    return OK;
}

/* Moves out what was counted since the last time: the rows, of which the first is that of all that found no room; the
 * names, one after the other, each with a zero at its end; and the raw records, as they came. `room_*` say how many
 * entries, or bytes, there is room for: at least what ks_limits() says. How many there are is in the totals. Counting
 * goes on meanwhile, in the other one of two tables. */
EXPORT int ks_take(Row *rows, uint32_t room_rows, char *names, uint32_t room_names, Raw *raws, uint32_t room_raws,
                   Totals *totals)
{
    if (atomic_load(&forked))
        return fail_forked();
    if (room_rows < 1 + ROWS || room_names < NAME_BYTES || room_raws < RAWS)
        return fail(ARGUMENT, "too little room");
    pthread_mutex_lock(&taking);
    pthread_mutex_lock(&counting);
    Table *full = active;
    if (full)
        active = full == tables ? tables + 1 : tables;
    pthread_mutex_unlock(&counting);
    if (full) {
        *totals = full->totals;
        memcpy(rows, full->rows, totals->rows * sizeof *rows);
        memcpy(names, full->bytes, totals->name_bytes);
        memcpy(raws, full->raws, totals->raws * sizeof *raws);
        totals->cupti_dropped = atomic_exchange(&cupti_dropped, 0);
        totals->late_buffers = atomic_exchange(&late_buffers, 0);
        totals->late_bytes = atomic_exchange(&late_bytes, 0);
        totals->strays = atomic_exchange(&strays, 0);
        totals->refusals = atomic_exchange(&refusals, 0);
        totals->held = (uint64_t)__builtin_popcount(atomic_load(&held));
        totals->steps = atomic_exchange(&steps, 0);
        reset(full);
    }
    pthread_mutex_unlock(&taking);
    return full ? OK : fail(NOT_OPEN, "CUPTI's library isn't open");
}

/* ---- The native tracer's own functions. None gives anything back. ---- */

/* Under `control`. */
static int step_on(unsigned unused)
{
    (void)unused;
    /* Taken back meanwhile, perhaps. */
    unsigned wanted = atomic_exchange(&armed, 0);
    if (!wanted)
        return OK;
    int result = start(wanted);
    atomic_store(&stepping, result ? 0 : wanted);
    atomic_fetch_add(&steps, result == OK);
    return result;
}

static int step_off(unsigned unused)
{
    (void)unused;
    return atomic_exchange(&stepping, 0) ? record(0) : OK;
}

static void switched_by_step(int (*act)(unsigned))
{
    int result = switched(act, 0);
    if (result == OK || result == FORKED)
        return;
    pthread_mutex_lock(&telling);
    step_result = result;
    memcpy(step_error, error, sizeof step_error);
    pthread_mutex_unlock(&telling);
}

EXPORT void dd_training_step_begin(void)
{
    unsigned wanted = atomic_load_explicit(&armed, memory_order_relaxed);
    if (!wanted)
        return;
    if (atomic_load(&stepping) == wanted && !atomic_load(&forked)) {
        /* On already. Where it goes off at this moment, that holds: nothing is switched here. */
        if (atomic_compare_exchange_strong(&armed, &wanted, 0))
            atomic_fetch_add(&steps, 1);
        return;
    }
    switched_by_step(step_on);
}

EXPORT void dd_training_step_end(void)
{
    if (!atomic_load_explicit(&stepping, memory_order_relaxed) || atomic_load_explicit(&armed, memory_order_relaxed))
        return;
    switched_by_step(step_off);
}

static Context parent; /* under `telling` */

/* Copies what fits; bytes behind its end are zero. */
static void copy(char *into, size_t room, const char *text)
{
    size_t length = strnlen(text, room - 1);
    memcpy(into, text, length);
    memset(into + length, 0, room - length);
}

EXPORT void dd_set_global_parent_context(uint64_t trace_id_lo, uint64_t trace_id_hi, uint64_t span_id,
                                         bool has_sampling_priority, int sampling_priority, const char *const *keys,
                                         const char *const *values, size_t count)
{
    if (atomic_load(&forked))
        return;
    pthread_mutex_lock(&telling);
    parent = (Context){.trace_lo = trace_id_lo,
                       .trace_hi = trace_id_hi,
                       .span = span_id,
                       .has_priority = has_sampling_priority,
                       .priority = has_sampling_priority ? sampling_priority : 0};
    for (size_t i = 0; keys && values && i < count; i++) {
        if (parent.many == TAGS || !keys[i] || !values[i])
            continue;
        Tag *tag = &parent.tags[parent.many++];
        copy(tag->name, sizeof tag->name, keys[i]);
        copy(tag->value, sizeof tag->value, values[i]);
    }
    parent.left_out = count - parent.many;
    pthread_mutex_unlock(&telling);
}

EXPORT void dd_clear_global_parent_context(void)
{
    if (atomic_load(&forked))
        return;
    pthread_mutex_lock(&telling);
    memset(&parent, 0, sizeof parent);
    pthread_mutex_unlock(&telling);
}

/* Gives the parent that was handed over last; all zero where there is none, or none any more. */
EXPORT int ks_context(Context *into)
{
    if (atomic_load(&forked))
        return fail_forked();
    pthread_mutex_lock(&telling);
    *into = parent;
    pthread_mutex_unlock(&telling);
    return OK;
}
