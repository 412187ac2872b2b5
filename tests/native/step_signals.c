/* Stands in for the two functions of Datadog's native tracer: writes a letter for each call to $STEP_SIGNALS.
 *
 * -DUPPER: capitals, as what stands in for ours.
 */

#include "noting.h"

#ifdef UPPER
#define BEGUN "B"
#define ENDED "E"
#else
#define BEGUN "b"
#define ENDED "e"
#endif

void dd_training_step_begin(void) { note("STEP_SIGNALS", BEGUN); }
void dd_training_step_end(void) { note("STEP_SIGNALS", ENDED); }
