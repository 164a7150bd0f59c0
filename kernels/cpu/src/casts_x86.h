// What the vectors of AVX2 and AVX-512 have alike, behind their types.
#pragma once

namespace {

inline Ints as_ints(Floats x) { return reinterpret_cast<Ints>(x); }
inline Ints as_ints(Sums x) { return reinterpret_cast<Ints>(x); }
inline Floats as_floats(Sums x) { return reinterpret_cast<Floats>(x); }
// The compiler no longer knows what it is.
template <class Vector>
inline void hide(Vector& x) {
    asm volatile("" : "+v"(x));
}

}  // namespace
