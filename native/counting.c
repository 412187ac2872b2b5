/* The hot path of ddtrace_pytorch.collectives.wrappers, in C: a call of a collective in its ordinary form.
 *
 * The generated Python wrapper is the reference, and does whatever is out of the ordinary: a thread's or a group's
 * first call, one inside of another, one by a rank that is not in the group. Both add to the same cells of the same
 * ledger.
 * Nothing in here releases the interpreter's lock between reading a total and writing it, so totals are exact.
 *
 * What is instrumented is a copy of torch's function, with its code, of which only the way it is called is exchanged:
 * whoever looks at it (Dynamo, inspect, a traceback) finds torch's.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "relies on the interpreter's lock"
#endif

/* What ddtrace_pytorch.plain_numbers expects; another one whenever anything changes that Python sees of this module. */
#define INTERFACE 2

#define BUCKETS 64 /* as in ddtrace_pytorch.histogram */
#define RECENT 32  /* as in ddtrace_pytorch.plain_numbers */

/* What the Python classes inherit: numbers that are none of Python's objects, some of them a series that Python sees
 * through a memoryview. See ddtrace_pytorch.plain_numbers. */
typedef struct {
    PyObject_HEAD
    long long bytes, notable, number, time, unsized, waited, waits;
    long long buckets[BUCKETS];
} Cell;
typedef struct {
    PyObject_HEAD
    long long address, calls, sampled;
    struct {
        long long cell, bytes;
    } recent[RECENT];
} Group;
typedef struct {
    PyObject_HEAD
    long long address, started;
} Slot;
/* `asked`: the id of the group that was looked up last, 0 for none; whoever changes what there is to find has it be 0
 * again, so that `found`, which is borrowed, is never looked at after its end. */
typedef struct {
    PyObject_HEAD
    long long asked;
    PyObject *found;
} Line;

/* Where their other attributes lie, for they have __slots__; filled by lay_out(). */
static struct {
    PyTypeObject *cell, *line, *slot;
    Py_ssize_t default_, others; /* Line */
    Py_ssize_t call;           /* Slot */
    Py_ssize_t here, numbered; /* Cell */
} at;

static PyObject *name_slot, *name_counter;
static PyObject *dtypes; /* a tuple; see lay_out() */

/* An attribute of tensors. Of torch's own class, and no subclass, it is asked for without looking for it there. */
typedef struct {
    getter own;
    void *closure;
    PyObject *name;
} Attribute;
static Attribute nbytes, dtype;
static PyTypeObject *tensor_type;

static PyObject *get(PyObject *tensor, const Attribute *attribute)
{
    if (Py_TYPE(tensor) == tensor_type && attribute->own)
        return attribute->own(tensor, attribute->closure);
    return PyObject_GetAttr(tensor, attribute->name);
}

/* What is rarely done is kept out of the way of what always is: code has to be fetched, too. */
#define RARELY __attribute__((cold, noinline))

#define TYPE_NAME(name) "ddtrace_pytorch.collectives._counting." name
#define FIELD(object, offset) (*(PyObject **)((char *)(object) + (offset)))

static void set(PyObject *object, Py_ssize_t offset, PyObject *value) /* takes the reference */
{
    PyObject *old = FIELD(object, offset);
    FIELD(object, offset) = value;
    Py_XDECREF(old);
}

/* Clears an error of ours. One that is no Exception is the user's (KeyboardInterrupt, what the handler of a signal
 * raised): it stays set, and -1 is given. */
RARELY static int forgive(void)
{
    if (!PyErr_Occurred())
        return 0;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Clear();
    return 0;
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* A parameter of the function: its name, and its position; -1 where the function has none such. */
typedef struct {
    Py_ssize_t position;
    PyObject *name;
} Parameter;

typedef struct {
    PyObject_HEAD
    PyObject *original; /* torch's function */
    PyObject *waited, *issued;
    Parameter group, deferred, sized;
    PyObject *default_group;
    PyObject *size; /* called for the bytes of a message; None where those are `nbytes` of the parameter `sized` */
    int always_deferred, numbered;
    uint64_t thread; /* the last that called, Python's number of it, which no other ever has; its slot, borrowed */
    PyObject *slot;
    PyObject *dtype; /* the last one that was seen, borrowed from `dtypes`, and its place there */
    int64_t place;
    Parameter first;
    PyObject *careful; /* the generated wrapper around `original` */
    PyObject *local;   /* its attribute `slot` is the thread's */
    PyObject *track;
} Counter;

/* The counters of functions that were called, by where the function lies; all of it borrowed. A function's attributes
 * are far from each other in memory, and this is one place. */
static struct {
    PyObject *function;
    Counter *counter;
} called[64];

#define CALLED(function) (called + ((uintptr_t)(function) / 16 * 0x9E3779B97F4A7C15u >> 58))

static void uncall(Counter *gone)
{
    for (size_t i = 0; i < sizeof called / sizeof *called; i++)
        if (called[i].counter == gone)
            called[i].function = NULL;
}

/* The argument of `parameter`, borrowed; NULL where the call leaves it to its default. */
static PyObject *argument(const Parameter *parameter, PyObject *const *args, Py_ssize_t many, PyObject *names)
{
    if (parameter->position < 0)
        return NULL;
    if (parameter->position < many)
        return args[parameter->position];
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; i++) /* as good as always, without a look into the name */
        if (PyTuple_GET_ITEM(names, i) == parameter->name)
            return args[many + i];
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), parameter->name) == 0)
            return args[many + i];
    return NULL;
}

RARELY static PyObject *find_slot(Counter *self, uint64_t thread)
{
    PyObject *slot = PyObject_GetAttr(self->local, name_slot);
    if (!slot || Py_TYPE(slot) != at.slot) {
        Py_XDECREF(slot);
        PyErr_Clear();
        return NULL;
    }
    self->thread = thread;
    self->slot = slot;
    Py_DECREF(slot); /* `local` holds it */
    return slot;
}

RARELY static PyObject *find_cell(Line *line, PyObject *group)
{
    PyObject *others = FIELD(line, at.others), *identity = PyLong_FromVoidPtr(group);
    PyObject *cell = others && identity ? PyDict_GetItemWithError(others, identity) : NULL;
    Py_XDECREF(identity);
    PyErr_Clear();
    if (!cell || Py_TYPE(cell) != at.cell)
        return NULL;
    line->asked = (long long)(intptr_t)group;
    line->found = cell;
    return cell;
}

/* The cell that a call belongs to, a new reference; NULL (no error set) where the wrapper has to find out. */
static PyObject *cell_of(Counter *self, int deferred, PyObject *group)
{
    Line *line = (Line *)(deferred ? self->issued : self->waited);
    PyObject *cell;
    if (group != Py_None) {
        cell = line->asked == (long long)(intptr_t)group ? line->found : find_cell(line, group);
    } else {
        cell = FIELD(line, at.default_);
        if (cell && Py_TYPE(cell) != at.cell)
            cell = NULL;
    }
    return Py_XNewRef(cell);
}

/* This thread's slot, borrowed: it lives as long as Python's thread and `local`. NULL (no error set) before the first
 * call. A thread of C++ that calls Python again and again is another thread of Python's each time. */
static PyObject *slot_of(Counter *self)
{
    uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    return self->thread == thread ? self->slot : find_slot(self, thread);
}

/* Asks `size`; NULL where it doesn't say. */
RARELY static PyObject *ask_size(Counter *self, PyObject *here, PyObject *const *args, Py_ssize_t many, PyObject *names)
{
    Py_ssize_t all = many + (names ? PyTuple_GET_SIZE(names) : 0);
    PyObject *with_group[24];
    if (all >= 24)
        return NULL;
    with_group[0] = here;
    for (Py_ssize_t i = 0; i < all; i++)
        with_group[i + 1] = args[i];
    return PyObject_Vectorcall(self->size, with_group, many + 1, names);
}

/* Puts into `bytes` those of the message; -1 where it has none. Itself -1 with an error of the user's set. */
static int find_bytes(Counter *self, PyObject *here, PyObject *const *args, Py_ssize_t many, PyObject *names,
                      int64_t *bytes)
{
    PyObject *size = NULL;
    *bytes = 0;
    if (self->size == Py_None) {
        PyObject *tensor = argument(&self->sized, args, many, names);
        if (self->sized.position < 0)
            return 0;
        if (tensor)
            size = get(tensor, &nbytes);
    } else {
        size = ask_size(self, here, args, many, names);
    }
    *bytes = size && PyLong_Check(size) ? PyLong_AsLongLong(size) : -1;
    Py_XDECREF(size);
    return *bytes < 0 ? forgive() : 0;
}

/* -1 with an error of the user's set. */
RARELY static int note(PyObject *cell, int64_t started, int64_t took, int64_t bytes, int64_t key)
{
    Py_XDECREF(PyObject_CallMethod(cell, "note", "LLLL", (long long)started, (long long)took, (long long)bytes,
                                   (long long)key));
    return forgive();
}

/* Adds a call that came back to its cell; -1 with an error of the user's set. */
static int count(Counter *self, PyObject *object, PyObject *here, int64_t started, int64_t took, int64_t bytes)
{
    Cell *cell = (Cell *)object;
    Group *group = (Group *)here;
    int bucket = took > 0 ? 64 - __builtin_clzll((uint64_t)took) : 0;
    int64_t key = 0;
    if (bytes < 0) {
        bytes = 0;
        cell->unsized++;
    }
    cell->buckets[bucket]++; /* `took` has a sign: never more than 63 */
    cell->time += took;
    if (__builtin_add_overflow(cell->bytes, bytes, &cell->bytes))
        cell->bytes = LLONG_MAX;
    if (self->numbered) {
        key = ++group->calls;
        group->recent[key % RECENT].cell = cell->number + 1;
        group->recent[key % RECENT].bytes = bytes;
    }
    if (took > cell->notable || (self->numbered && key >= group->sampled))
        return note(object, started, took, bytes, key);
    return 0;
}

RARELY static int64_t place_of(Counter *self, PyObject *found)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dtypes); i++)
        if (PyTuple_GET_ITEM(dtypes, i) == found) {
            self->dtype = found;
            return self->place = i + 1;
        }
    return 0;
}

/* The place of the dtype of `subject`, a tensor or a sequence of them, among `dtypes`, from 1 on; 0: it has none. -1
 * with an error of the user's set. */
static int64_t dtype_of(Counter *self, PyObject *subject)
{
    if (PyList_Check(subject))
        subject = PyList_GET_SIZE(subject) ? PyList_GET_ITEM(subject, 0) : Py_None;
    PyObject *found = get(subject, &dtype);
    if (!found)
        return forgive();
    int64_t place = found == self->dtype ? self->place : place_of(self, found);
    Py_DECREF(found);
    return place;
}

/* By which a reader knows numbers that all belong together: it may come in the midst of them. As `check` of
 * ddtrace_pytorch.stalls.positions. */
static int64_t check(const int64_t *numbers, int many)
{
    uint64_t sum = 0;
    for (int i = 0; i < many; i++)
        sum = sum * 0x9E3779B97F4A7C15u + (uint64_t)numbers[i];
    return (int64_t)sum;
}

/* Writes what this thread enters to where it outlives the process; see ddtrace_pytorch.stalls.positions. -1 with an
 * error of the user's set, and nothing written. */
static int enter(Counter *self, PyObject *cell, PyObject *here, PyObject *slot, PyObject *subject, int64_t started,
                 int64_t bytes)
{
    if (!((Slot *)slot)->address)
        return 0;
    int64_t dtype = subject ? dtype_of(self, subject) : 0;
    if (dtype < 0)
        return -1;
    volatile int64_t *position = (int64_t *)(intptr_t)((Slot *)slot)->address; /* again: Python may have run */
    if (!position)
        return 0;
    int64_t number = ((Cell *)cell)->number + 1, key = self->numbered ? ((Group *)here)->calls + 1 : 0;
    position[1] = key;
    position[2] = bytes;
    position[3] = dtype;
    position[4] = started;
    position[6] = check((int64_t[]){number, key, bytes, dtype, started}, 5);
    position[0] = number;
    return 0;
}

static void leave(PyObject *slot)
{
    volatile int64_t *position = (int64_t *)(intptr_t)((Slot *)slot)->address;
    if (position)
        position[0] = 0;
}

/* Tells of the error that is set, and leaves it set; or one of the user's that came meanwhile, in its context. */
RARELY static void fail(PyObject *cell)
{
    PyObject *kind, *error, *traceback;
    PyErr_Fetch(&kind, &error, &traceback);
    PyErr_NormalizeException(&kind, &error, &traceback);
    if (traceback)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(PyObject_CallMethod(cell, "fail", "O", error));
    if (!forgive()) {
        PyErr_Restore(kind, error, traceback);
        return;
    }
    PyObject *later, *newer, *its_traceback;
    PyErr_Fetch(&later, &newer, &its_traceback);
    PyErr_NormalizeException(&later, &newer, &its_traceback);
    PyException_SetContext(newer, error); /* takes the reference */
    Py_XDECREF(kind);
    Py_XDECREF(traceback);
    PyErr_Restore(later, newer, its_traceback);
}

static PyObject *call_counted(Counter *self, PyObject *cell, PyObject *slot, int deferred, PyObject *const *args,
                              size_t flags, PyObject *names)
{
    Py_ssize_t many = PyVectorcall_NARGS(flags);
    PyObject *here = Py_NewRef(FIELD(cell, at.here));
    int64_t bytes, started = 0;
    int theirs = find_bytes(self, here, args, many, names, &bytes);
    if (!theirs) {
        /* That of which the size is asked is in the processor's reach already. */
        const Parameter *subject = self->sized.position >= 0 ? &self->sized : &self->first;
        started = now();
        theirs = enter(self, cell, here, slot, argument(subject, args, many, names), started, bytes);
    }
    if (theirs) {
        Py_DECREF(here);
        return NULL;
    }
    ((Slot *)slot)->started = started;
    set(slot, at.call, Py_NewRef(cell));
    PyObject *result = PyObject_Vectorcall(self->original, args, flags, names);
    int64_t took = now() - started;
    if (result)
        leave(slot);
    set(slot, at.call, Py_NewRef(Py_None));
    if (result) {
        if (deferred && result != Py_None) {
            Py_XDECREF(PyObject_CallFunctionObjArgs(self->track, result, cell, NULL));
            theirs = forgive();
        }
        if (theirs || count(self, cell, here, started, took, bytes))
            Py_CLEAR(result);
    } else {
        fail(cell);
        leave(slot); /* not before it is written elsewhere that it raised */
    }
    Py_DECREF(here);
    return result;
}

/* NULL with an error set. */
RARELY static Counter *find_counter(PyObject *function)
{
    PyObject *attributes = ((PyFunctionObject *)function)->func_dict;
    Counter *found = attributes ? (Counter *)PyDict_GetItemWithError(attributes, name_counter) : NULL;
    if (!found) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "ddtrace_pytorch: an instrumented function has lost its counter");
        return NULL;
    }
    CALLED(function)->function = function;
    CALLED(function)->counter = found;
    return found;
}

/* What counts the calls of `function`, borrowed; NULL with an error set. */
static Counter *counter_of(PyObject *function)
{
    return CALLED(function)->function == function ? CALLED(function)->counter : find_counter(function);
}

/* How an instrumented function is called. */
static PyObject *call(PyObject *function, PyObject *const *args, size_t flags, PyObject *names)
{
    Counter *self = counter_of(function);
    if (!self)
        return NULL;
    Py_INCREF(self); /* released by another thread meanwhile, it goes after this call */
    Py_ssize_t many = PyVectorcall_NARGS(flags);
    PyObject *group = argument(&self->group, args, many, names);
    PyObject *asked = argument(&self->deferred, args, many, names);
    int deferred = self->always_deferred || (asked && asked == Py_True);
    PyObject *cell = NULL, *slot = NULL, *result;
    if (!asked || PyBool_Check(asked)) {
        cell = cell_of(self, deferred, group ? group : self->default_group);
        slot = cell ? slot_of(self) : NULL;
    }
    if (slot && FIELD(slot, at.call) == Py_None)
        result = call_counted(self, cell, slot, deferred, args, flags, names);
    else
        result = PyObject_Vectorcall(self->careful, args, flags, names);
    Py_XDECREF(cell);
    Py_DECREF(self);
    return result;
}

static int traverse(Counter *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->original);
    Py_VISIT(self->careful);
    Py_VISIT(self->waited);
    Py_VISIT(self->issued);
    Py_VISIT(self->local);
    Py_VISIT(self->track);
    Py_VISIT(self->size);
    Py_VISIT(self->default_group);
    return 0;
}

/* Not tp_clear: a call may be under way. All that a counter refers to can be cleared itself. */
static void dealloc(Counter *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    uncall(self);
    Py_XDECREF(self->original);
    Py_XDECREF(self->careful);
    Py_XDECREF(self->waited);
    Py_XDECREF(self->issued);
    Py_XDECREF(self->local);
    Py_XDECREF(self->track);
    Py_XDECREF(self->size);
    Py_XDECREF(self->default_group);
    Py_XDECREF(self->first.name);
    Py_XDECREF(self->group.name);
    Py_XDECREF(self->deferred.name);
    Py_XDECREF(self->sized.name);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot counter_slots[] = {
    {Py_tp_traverse, traverse},
    {Py_tp_dealloc, dealloc},
    {Py_tp_doc, "What a call of one instrumented function needs to know."},
    {0, NULL},
};
static PyType_Spec counter_spec = {
    TYPE_NAME("Counter"), sizeof(Counter), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, counter_slots};
static PyTypeObject *counter_type;

/* `function`'s calls, from now on counted; see _counting.pyi. */
static PyObject *instrument(PyObject *module, PyObject *args)
{
    PyObject *function, *original, *careful, *waited, *issued, *local, *track, *size, *default_group;
    Parameter first, group, deferred, sized;
    int always_deferred, numbered;
    if (!PyArg_ParseTuple(args, "O!O!OOOOOOO(nU)(nU)(nU)(nU)pp:instrument", &PyFunction_Type, &function,
                          &PyFunction_Type, &original, &careful, &waited, &issued, &local, &track, &size,
                          &default_group, &first.position, &first.name, &group.position, &group.name,
                          &deferred.position, &deferred.name, &sized.position, &sized.name, &always_deferred,
                          &numbered))
        return NULL;
    if (!at.cell) {
        PyErr_SetString(PyExc_RuntimeError, "lay_out() comes first");
        return NULL;
    }
    if (Py_TYPE(waited) != at.line || Py_TYPE(issued) != at.line) {
        PyErr_SetString(PyExc_TypeError, "both lines have to be of the class that lay_out() was given");
        return NULL;
    }
    Counter *self = PyObject_GC_New(Counter, counter_type);
    if (!self)
        return NULL;
    self->original = Py_NewRef(original);
    self->careful = Py_NewRef(careful);
    self->waited = Py_NewRef(waited);
    self->issued = Py_NewRef(issued);
    self->local = Py_NewRef(local);
    self->thread = 0;
    self->slot = NULL;
    self->track = Py_NewRef(track);
    self->size = Py_NewRef(size);
    self->default_group = Py_NewRef(default_group);
    self->first = first;
    self->group = group;
    self->deferred = deferred;
    self->sized = sized;
    Py_INCREF(first.name);
    Py_INCREF(group.name);
    Py_INCREF(deferred.name);
    Py_INCREF(sized.name);
    self->always_deferred = always_deferred;
    self->numbered = numbered;
    self->dtype = NULL;
    self->place = 0;
    PyObject_GC_Track(self);
    if (CALLED(function)->function == function) /* of one that lay there before */
        CALLED(function)->function = NULL;
    int failed = PyObject_SetAttr(function, name_counter, (PyObject *)self);
    Py_DECREF(self);
    if (failed)
        return NULL;
#if PY_VERSION_HEX >= 0x030C0000
    PyFunction_SetVectorcall((PyFunctionObject *)function, call);
#else
    ((PyFunctionObject *)function)->vectorcall = call;
#endif
    Py_RETURN_NONE;
}

/* Undoes instrument(): whoever still holds `function` calls torch's. */
static PyObject *release(PyObject *module, PyObject *function)
{
    if (!PyFunction_Check(function) || ((PyFunctionObject *)function)->vectorcall != call)
        Py_RETURN_NONE;
    Counter *self = (Counter *)PyObject_GetAttr(function, name_counter);
    if (!self)
        return NULL;
    ((PyFunctionObject *)function)->vectorcall = ((PyFunctionObject *)self->original)->vectorcall;
    uncall(self);
    Py_DECREF(self);
    if (PyObject_DelAttr(function, name_counter))
        return NULL;
    Py_RETURN_NONE;
}

static PyTypeObject *of_cell, *of_group, *of_slot, *of_line;

#define NUMBER(type, name) {#name, T_LONGLONG, offsetof(type, name), 0, NULL}

static PyObject *get_bytes(PyObject *cell, void *closure)
{
    return PyLong_FromLongLong(((Cell *)cell)->bytes);
}

/* More than there is room for is as much as there is: no sum of ours may raise in the middle of the user's call. */
static int set_bytes(PyObject *cell, PyObject *value, void *closure)
{
    int overflow;
    long long bytes = value ? PyLong_AsLongLongAndOverflow(value, &overflow) : 0;
    if (bytes == -1 && PyErr_Occurred())
        return -1;
    ((Cell *)cell)->bytes = value && overflow ? LLONG_MAX : bytes;
    return 0;
}

static PyGetSetDef cell_bytes[] = {{"bytes", get_bytes, set_bytes, NULL, NULL}, {0}};
static PyMemberDef cell_members[] = {NUMBER(Cell, notable), NUMBER(Cell, number), NUMBER(Cell, time),
                                     NUMBER(Cell, unsized), NUMBER(Cell, waited), NUMBER(Cell, waits), {0}};
static PyMemberDef group_members[] = {NUMBER(Group, address), NUMBER(Group, calls), NUMBER(Group, sampled), {0}};
static PyMemberDef slot_members[] = {NUMBER(Slot, address), NUMBER(Slot, started), {0}};
static PyMemberDef line_members[] = {NUMBER(Line, asked), {0}};

/* Counts a collective among the group's, and writes it to where it outlives the process; see _counting.pyi. */
static PyObject *group_number(PyObject *self, PyObject *const *args, Py_ssize_t many)
{
    if (many != 2 || !PyObject_TypeCheck(args[0], of_cell))
        return PyErr_Format(PyExc_TypeError, "number() takes a cell of the ledger and bytes");
    int overflow;
    int64_t bytes = PyLong_AsLongLongAndOverflow(args[1], &overflow);
    if (bytes == -1 && PyErr_Occurred())
        return NULL;
    if (overflow)
        bytes = LLONG_MAX;
    Group *group = (Group *)self;
    int64_t key = ++group->calls, number = ((Cell *)args[0])->number + 1;
    group->recent[key % RECENT].cell = number;
    group->recent[key % RECENT].bytes = bytes;
    volatile int64_t *issued = (int64_t *)(intptr_t)group->address;
    if (issued) {
        issued[1] = key;
        issued[2] = bytes;
        issued[3] = check((int64_t[]){number, key, bytes}, 3);
        issued[0] = number;
    }
    return PyLong_FromLongLong(key);
}

static PyMethodDef group_methods[] = {
    {"number", (PyCFunction)(void (*)(void))group_number, METH_FASTCALL, NULL},
    {0},
};

static int view_buckets(PyObject *cell, Py_buffer *buffer, int flags)
{
    return PyBuffer_FillInfo(buffer, cell, ((Cell *)cell)->buckets, sizeof ((Cell *)cell)->buckets, 0, flags);
}

static int view_recent(PyObject *group, Py_buffer *buffer, int flags)
{
    return PyBuffer_FillInfo(buffer, group, ((Group *)group)->recent, sizeof ((Group *)group)->recent, 0, flags);
}

/* A class to inherit from that has these numbers, all 0 at first. `view`: of the series of them. */
static PyTypeObject *numbers_type(PyObject *module, const char *name, int size, PyMemberDef *members,
                                  PyGetSetDef *more, PyMethodDef *methods, getbufferproc view)
{
    PyType_Slot slots[5] = {{Py_tp_members, members}}, *next = slots + 1;
    if (more)
        *next++ = (PyType_Slot){Py_tp_getset, more};
    if (methods)
        *next++ = (PyType_Slot){Py_tp_methods, methods};
    if (view)
        *next++ = (PyType_Slot){Py_bf_getbuffer, view};
    PyType_Spec spec = {name, size, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
    PyObject *type = PyType_FromSpec(&spec);
    if (type && PyModule_AddObjectRef(module, strrchr(name, '.') + 1, type))
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int find(PyTypeObject *type, const char *name, Py_ssize_t *offset)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    if (!found)
        return -1;
    if (Py_TYPE(found) != &PyMemberDescr_Type) {
        PyErr_Format(PyExc_TypeError, "%s.%s is not in __slots__", type->tp_name, name);
        Py_DECREF(found);
        return -1;
    }
    *offset = ((PyMemberDescrObject *)found)->d_member->offset;
    Py_DECREF(found);
    return 0;
}

/* Finds what the class of tensors has for `attribute`; nothing, where that is no getter of C. `tensor_type` is never let
 * go of, nor is what it was made with. */
static void find_own(Attribute *attribute)
{
    PyObject *found = PyObject_GetAttr((PyObject *)tensor_type, attribute->name);
    attribute->own = NULL;
    if (found && Py_TYPE(found) == &PyGetSetDescr_Type) {
        attribute->own = ((PyGetSetDescrObject *)found)->d_getset->get;
        attribute->closure = ((PyGetSetDescrObject *)found)->d_getset->closure;
    }
    Py_XDECREF(found);
    PyErr_Clear();
}

/* Finds where the attributes of the ledger's classes lie; see _counting.pyi. */
static PyObject *lay_out(PyObject *module, PyObject *args)
{
    PyTypeObject *cell, *line, *group, *slot, *tensor;
    PyObject *known;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!:lay_out", &PyType_Type, &cell, &PyType_Type, &line, &PyType_Type, &group,
                          &PyType_Type, &slot, &PyType_Type, &tensor, &PyTuple_Type, &known))
        return NULL;
    const struct {
        PyTypeObject *type;
        const char *name;
        Py_ssize_t *offset;
    } fields[] = {
        {line, "default", &at.default_}, {line, "others", &at.others},     {slot, "call", &at.call},
        {cell, "group", &at.here},       {cell, "numbered", &at.numbered},
    };
    if (!PyType_IsSubtype(cell, of_cell) || !PyType_IsSubtype(group, of_group) || !PyType_IsSubtype(slot, of_slot) ||
        !PyType_IsSubtype(line, of_line)) {
        PyErr_SetString(PyExc_TypeError, "these classes don't have the numbers of this module");
        return NULL;
    }
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (find(fields[i].type, fields[i].name, fields[i].offset))
            return NULL;
    Py_XSETREF(at.line, (PyTypeObject *)Py_NewRef(line));
    Py_XSETREF(at.slot, (PyTypeObject *)Py_NewRef(slot));
    Py_XSETREF(at.cell, (PyTypeObject *)Py_NewRef(cell));
    Py_XSETREF(dtypes, Py_NewRef(known));
    Py_XSETREF(tensor_type, (PyTypeObject *)Py_NewRef(tensor));
    find_own(&nbytes);
    find_own(&dtype);
    Py_RETURN_NONE;
}

/* The ns that all `cells`, the keys of a dict, have counted. */
static PyObject *times(PyObject *module, PyObject *cells)
{
    PyObject *cell, *value;
    Py_ssize_t position = 0;
    int64_t sum = 0;
    if (!PyDict_Check(cells))
        return PyErr_Format(PyExc_TypeError, "cells must be in a dict");
    while (PyDict_Next(cells, &position, &cell, &value))
        if (Py_TYPE(cell) == at.cell)
            sum += ((Cell *)cell)->time + ((Cell *)cell)->waited;
    return PyLong_FromLongLong(sum);
}

/* Takes a Work that is gone out of those that are followed. */
static PyObject *forget(PyObject *pending, PyObject *gone)
{
    if (PyDict_DelItem(pending, gone) && PyErr_ExceptionMatches(PyExc_KeyError))
        PyErr_Clear(); /* it was waited for */
    if (forgive())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef forget_method = {"forget", forget, METH_O, NULL};

/* Follows a Work; `known` are the pending ones, what forgets one, and a list of what is to be called before the first.
 * One that can't be followed is none that anybody has to hear of. */
static PyObject *track(PyObject *known, PyObject *const *args, Py_ssize_t many)
{
    PyObject *first = PyTuple_GET_ITEM(known, 2);
    if (many < 2 || Py_TYPE(args[1]) != at.cell)
        Py_RETURN_NONE;
    if (PyList_GET_SIZE(first)) {
        PyObject *begin = Py_NewRef(PyList_GET_ITEM(first, 0));
        Py_XDECREF(PyObject_CallNoArgs(begin));
        Py_DECREF(begin);
    }
    if (!PyErr_Occurred()) {
        PyObject *cell = args[1], *peer = many > 2 ? args[2] : Py_None;
        int64_t key = FIELD(cell, at.numbered) == Py_True ? ((Group *)FIELD(cell, at.here))->calls + 1 : 0;
        PyObject *reference = PyWeakref_NewRef(args[0], PyTuple_GET_ITEM(known, 1));
        PyObject *awaited = Py_BuildValue("OLO", cell, (long long)key, peer);
        if (reference && awaited)
            PyDict_SetItem(PyTuple_GET_ITEM(known, 0), reference, awaited);
        Py_XDECREF(reference);
        Py_XDECREF(awaited);
    }
    if (forgive())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef track_method = {"track", (PyCFunction)(void (*)(void))track, METH_FASTCALL, NULL};

/* Makes a function that follows Works; see _counting.pyi. */
static PyObject *tracker(PyObject *module, PyObject *args)
{
    PyObject *pending, *first, *made = NULL;
    if (!PyArg_ParseTuple(args, "O!O!:tracker", &PyDict_Type, &pending, &PyList_Type, &first))
        return NULL;
    PyObject *forgets = PyCFunction_New(&forget_method, pending);
    PyObject *known = forgets ? PyTuple_Pack(3, pending, forgets, first) : NULL;
    if (known)
        made = PyCFunction_New(&track_method, known);
    Py_XDECREF(known);
    Py_XDECREF(forgets);
    return made;
}

static PyMethodDef functions[] = {
    {"lay_out", lay_out, METH_VARARGS, NULL},
    {"instrument", instrument, METH_VARARGS, NULL},
    {"release", release, METH_O, NULL},
    {"times", times, METH_O, NULL},
    {"tracker", tracker, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_counting", "The hot path in C.", -1, functions};

PyMODINIT_FUNC PyInit__counting(void)
{
    name_slot = PyUnicode_InternFromString("slot");
    nbytes.name = PyUnicode_InternFromString("nbytes");
    dtype.name = PyUnicode_InternFromString("dtype");
    name_counter = PyUnicode_InternFromString("_ddtrace_pytorch_counter");
    counter_type = (PyTypeObject *)PyType_FromSpec(&counter_spec);
    if (!name_slot || !nbytes.name || !dtype.name || !name_counter || !counter_type)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (PyModule_AddIntMacro(module, INTERFACE) ||
        !(of_cell = numbers_type(module, TYPE_NAME("CellNumbers"), sizeof(Cell), cell_members, cell_bytes,
                                 NULL, view_buckets)) ||
        !(of_group = numbers_type(module, TYPE_NAME("GroupNumbers"), sizeof(Group), group_members, NULL,
                                  group_methods, view_recent)) ||
        !(of_slot = numbers_type(module, TYPE_NAME("SlotNumbers"), sizeof(Slot), slot_members, NULL, NULL,
                                 NULL)) ||
        !(of_line = numbers_type(module, TYPE_NAME("LineNumbers"), sizeof(Line), line_members, NULL, NULL,
                                 NULL)))
        Py_CLEAR(module);
    return module;
}
