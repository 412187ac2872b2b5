/* Stands in for Datadog's native tracer: writes each call with all it is given to $PARENT_CONTEXT.<pid>, a line a call.
 *
 * What is handed over is read when the next call comes, too: who hands it over has to keep it until then.
 * -DNO_CLEAR, -DNO_SET: without that function.
 */

#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "noting.h"

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static const char *const *kept_keys, *const *kept_values;
static size_t kept;

static size_t tags(char *to, size_t room, const char *const *keys, const char *const *values, size_t count)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++)
        used += (size_t)snprintf(to + used, room - used, "\t%s=%s", keys[i], values[i]);
    return used;
}

/* What was handed over last, as it is now. */
static void note_kept(void)
{
    char line[8192] = "kept";
    if (kept) {
        tags(line + 4, sizeof line - 6, kept_keys, kept_values, kept);
        strcat(line, "\n");
        note("PARENT_CONTEXT", line);
    }
}

#ifndef NO_SET
void dd_set_global_parent_context(uint64_t trace_id_lo, uint64_t trace_id_hi, uint64_t span_id,
                                  bool has_sampling_priority, int sampling_priority,
                                  const char *const *keys, const char *const *values, size_t count)
{
    char line[8192];
    pthread_mutex_lock(&one_at_a_time);
    note_kept();
    size_t used = (size_t)snprintf(line, sizeof line, "set\t%" PRIx64 "\t%" PRIx64 "\t%" PRIx64 "\t%d\t%d\t%zu",
                                   trace_id_lo, trace_id_hi, span_id, has_sampling_priority, sampling_priority, count);
    tags(line + used, sizeof line - used - 2, keys, values, count);
    strcat(line, "\n");
    note("PARENT_CONTEXT", line);
    kept_keys = keys;
    kept_values = values;
    kept = count;
    pthread_mutex_unlock(&one_at_a_time);
}
#endif

#ifndef NO_CLEAR
void dd_clear_global_parent_context(void)
{
    pthread_mutex_lock(&one_at_a_time);
    note_kept();
    kept = 0;
    note("PARENT_CONTEXT", "clear\n");
    pthread_mutex_unlock(&one_at_a_time);
}
#endif
