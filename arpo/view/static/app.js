console.log("arpo view");
